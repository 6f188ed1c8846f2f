"""Mistakes a user can make, each with the exit code that the commands document (docs/commands.md)."""

import errno
import functools
import logging
import os
import re
from typing import Any

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
REFUSED += (errno.ENAMETOOLONG, errno.ELOOP)


class DominoError(Exception):
    """A mistake outside the program. The message names the two things that disagree and what to change."""

    exit_code = 2  # usage, configuration or environment


class DataError(DominoError):
    """Data or a checkpoint that cannot be used."""

    exit_code = 3

    def __init__(self, message: str, field: str | None = None):
        """field: the one whose value has to change, where that is one of a checked dataclass."""
        super().__init__(message)
        self.field = field


class ConfigError(DataError):
    """A value of a config.json that cannot be used, as a predicate: "has head_dim 7, …"; `file` holds it."""

    file = "config.json"

    def __str__(self) -> str:
        return f"{self.file} {self.args[0]}"


class NonFiniteError(DominoError):
    """A loss or gradient that is not finite."""

    exit_code = 4


def quote(value: Any) -> str:
    """A value out of a file, fit for a message: escaped, so that it stays on one line, and short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_value(fine: bool, name: str, value: Any, expected: str) -> None:
    """DataError for a value out of a file that is not of the expected kind. name: with the place in the file."""
    if not fine:
        raise DataError(f"{name} is {quote(value)}, expected {expected}.")


@functools.lru_cache(maxsize=256)
def warn_once(log: logging.Logger, text: str) -> None:
    """A warning about a folder that a command opens several times."""
    log.warning("%s", text)


def first_line(error: BaseException, with_class: bool = True) -> str:
    """An exception as part of a one-line message: its class and the first 200 characters of its text.

    An error of the operating system, also one that tensorstore quotes, becomes the system's text alone.
    """
    text = str(error).strip()
    number = _quoted_number(error)
    if number is not None:
        return os.strerror(number)
    if isinstance(error, OSError) and text.startswith(f"[Errno {error.errno}]"):
        return error.strerror
    name = type(error).__name__
    if not text:
        return name
    return f"{name}: "[: None if with_class else 0] + text.splitlines()[0][:200]


def is_full(error: BaseException) -> bool:
    """Whether a disk or a quota is full: an OSError, or an error of tensorstore that quotes one."""
    return getattr(error, "errno", None) in FULL or _quoted_number(error) in FULL


def _quoted_number(error: BaseException) -> int | None:
    """The number of the system's error that tensorstore quotes."""
    number = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    return int(number[1]) if number else None


def unwritable(place: str | os.PathLike, error: OSError) -> DominoError:
    """The error for a file or folder that could not be opened or written: exit code 3 on a full disk, else 2."""
    if error.errno in FULL:
        return DataError(
            f"{place} cannot be written: {os.strerror(error.errno)}.\n"
            "Make room and start again: everything that was written completely is still there."
        )
    problem = f"{place} cannot be opened or written: {error.strerror or error}."
    return DominoError(f"{problem}\nName another place, or give this user access to it.")
