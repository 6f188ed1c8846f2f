"""Mistakes a user can make, each with the exit code that the commands document (README, "Exit codes")."""

from typing import Any


class DominoError(Exception):
    """A mistake outside the program. The message names the two things that disagree and what to change."""

    exit_code = 2  # usage, configuration or environment


class DataError(DominoError):
    """Data or a checkpoint that cannot be used."""

    exit_code = 3


class NonFiniteError(DominoError):
    """A loss or gradient that is not finite."""

    exit_code = 4


def quote(value: Any) -> str:
    """A value out of a file, fit for a message: escaped, so that it stays on one line, and short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
