"""The table that every launcher follows: the ends of a run that start it again, how often and how fast.

Launchers written in Python import it; gke and xpk hand its numbers on, and a test holds slurm.sbatch against
it. Codes are a shell's: 128 + n is death by signal n. docs/commands.md explains the others.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable

SAVED = 42  # stopped by SIGTERM, with a checkpoint
HUNG = 43  # a step hung, and the watchdog ended the process

# Signals include SIGABRT, by which a process leaves that lost another one. Ctrl-C is a decision, so it is final, as is
# every other code: the next try would end the same way.
AGAIN = (SAVED, HUNG, *(128 + number for number in range(1, 32) if number != signal.SIGINT))

MAX_RESTARTS = 50  # starts after the first one

# Seconds before a new start: doubled each time, from the first again after a run that lasted.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
LASTED = 300.0

GRACE = 300  # seconds to save and leave in, after SIGTERM and before SIGKILL
INIT_SECONDS = 900  # that the processes wait for each other at a start: machines are not ready in the same minute

# For the train command. DOMINO_RESTARTED: a process that is late counts as lost (SIGABRT), not as a mistake (2).
ENVIRONMENT = {"DOMINO_INIT_SECONDS": str(INIT_SECONDS), "DOMINO_RESTARTED": "1"}


def shell_code(returncode: int) -> int:
    """A shell's exit code from Python's, which is -n after signal n."""
    return 128 - returncode if returncode < 0 else returncode


def starts_again(code: int) -> bool:
    return code in AGAIN


def verdict(codes: Iterable[int], again: Callable[[int], bool] = starts_again) -> int:
    """One exit code for all processes, given in the order of leaving.

    The first final failure wins: the restartable ones around it are its consequence.
    """
    failures = [code for code in codes if code]
    return next((code for code in failures if not again(code)), next(iter(failures), 0))


class Pauses:
    """The seconds to wait before each new start of one run."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE

    def after(self, seconds: float) -> float:
        """The pause after a run that lasted this many seconds."""
        if seconds >= LASTED:
            self._next = FIRST_PAUSE
        pause = self._next
        self._next = min(2 * pause, LONGEST_PAUSE)
        return pause
