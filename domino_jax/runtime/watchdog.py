"""Hung runs: print where every thread is, and end the process."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

HUNG = 43  # exit code: the run hung and the watchdog ended the process; every launcher starts the run again
# What may take longer than a step: the first step with its compilation, an evaluation, a save, the last wait.
SLOW = 10
# The report gets this long before the process ends: the terminal or pipe it is written to may be what hangs.
REPORT_SECONDS = 5.0
# The stacks are read without Python's lock. A thread that starts or ends meanwhile can crash the process.
STACKS_SECONDS = 0.5


class Watchdog:
    """Watches from `with` to its end: steps, each of which ends with beat(), and longer work, in slow()."""

    def __init__(self, seconds: float, end: Callable[[int], None] = os._exit):
        """
        Args:
          seconds: between two beats before the step counts as hung; SLOW times that for other work. 0 is off.
          end: called with HUNG, without any clean-up, because what hangs would hang in it too.
        """
        self._seconds, self._end = seconds, end
        self._watched, self._limit = "the start", SLOW * seconds
        self._timer = threading.Timer(0, print)

    def beat(self) -> None:
        """A step is done, and the next one begins."""
        self._watch("a step", self._seconds)

    def renew(self) -> None:
        """The watched work went on: its time begins again, with the same limit."""
        self._watch(self._watched, self._limit)

    @contextlib.contextmanager
    def slow(self, name: str, times: float = SLOW) -> Iterator[None]:
        """The work in here may take `times` as long as a step, 0 for any time; slow() within it begins a new watch."""
        self._watch(name, times * self._seconds)
        try:
            yield
        finally:
            self.beat()

    def __enter__(self) -> "Watchdog":
        self.renew()
        return self

    def __exit__(self, *exception) -> None:
        self._watch("", 0)

    def _watch(self, name: str, limit: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._timer.cancel()
        self._watched, self._limit = name, limit
        if limit:
            faulthandler.dump_traceback_later(limit, file=sys.__stderr__)
            self._timer = threading.Timer(limit + STACKS_SECONDS, self._report_and_end)
            self._timer.daemon = True
            self._timer.start()

    def _report_and_end(self) -> None:
        line = f"warning: {self._watched} has not ended for {self._limit:.0f} seconds: exit code {HUNG}"
        threading.Thread(target=print, args=(line,), kwargs={"flush": True}, daemon=True).start()
        time.sleep(REPORT_SECONDS)
        self._end(HUNG)
