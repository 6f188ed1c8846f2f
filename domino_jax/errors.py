"""Mistakes a user can make, each with the exit code that the commands document (README, "Exit codes")."""


class DominoError(Exception):
    """A mistake outside the program. The message names the two things that disagree and what to change."""

    exit_code = 2  # usage, configuration or environment


class DataError(DominoError):
    """Data or a checkpoint that cannot be used."""

    exit_code = 3


class NonFiniteError(DominoError):
    """A loss or gradient that is not finite."""

    exit_code = 4
