"""JSONL files that grow while a command works, so that a run that was killed continues where it was.

A line counts once its end is on the disk. What follows the last whole line was cut off by a kill, and the next start
removes it.
"""

import contextlib
import fcntl
import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.remote import open_path

# An object in a bucket cannot grow: it is replaced by a longer one, at most this often unless flush() asks for it.
BUCKET_SECONDS = 30.0


class Line(NamedTuple):
    """A whole line that is not blank. number: from 1.  start: its first byte.  text: with its line end."""

    number: int
    start: int
    text: bytes


class Journal:
    """A JSONL file opened for appending, on a disk or in a bucket (gs://). Only one process may have it open.

    On a disk a torn last line is removed.
    """

    def __init__(self, path: str | os.PathLike):
        self._object = open_path(path) if is_remote(path) else None
        self._file = io.BytesIO() if self._object else open(path, "ab")
        if self._object and self._object.exists():
            self._file.write(self._object.read_bytes())
        elif not self._object:
            self._file.truncate(max((line.start + len(line.text) for line in whole_lines(path)), default=0))
        self._flushed = time.monotonic()

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Adds a line for each row. On a disk they are then in the file; in a bucket they may wait for flush()."""
        self._file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        if not self._object or time.monotonic() - self._flushed > BUCKET_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Returns once every line is in the file."""
        if self._object:
            self._object.write_bytes(self._file.getvalue())
        else:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._flushed = time.monotonic()

    def clear(self) -> None:
        """Removes all lines."""
        self._file.truncate(0)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        self.flush()
        self._file.close()


def whole_lines(path: Path) -> Iterator[Line]:
    """The whole lines of a file in order, without the blank ones and without a torn last one."""
    start = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if text.strip() and text.endswith(b"\n"):
                yield Line(number, start, text)
            start += len(text)


@contextlib.contextmanager
def locked(path: Path, message: str | None = None) -> Iterator[None]:
    """Holds the lock of a file, which is created if it does not exist and removed if it is empty at the end.

    A DominoError, with this message, while another process holds it. On a file system without locks nothing is held.
    """
    message = message or f"another process is writing {path}; wait for it, or choose another --output."
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Else the process that held the lock has just replaced the file.
            free = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        except OSError as error:
            free = not isinstance(error, BlockingIOError)
        if not free:
            raise DominoError(message)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it may have been replaced or removed
                if not path.stat().st_size:
                    path.unlink()
