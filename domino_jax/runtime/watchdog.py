"""Hung runs: print where every thread is, and end the process."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

HUNG = 43  # exit code: the run hung and the watchdog ended the process; every launcher starts the run again
# What may take longer than a step: the first step with its compilation, an evaluation, a save, the last wait.
SLOW = 10
# What the report may take before the process is ended: the terminal or pipe it is written to may be what hangs.
REPORT_SECONDS = 5.0


class Watchdog:
    """Watches from `with` to its end: steps, each of which ends with beat(), and what is longer, in slow().

    A separate thread does the waiting. It needs the interpreter's lock, which JAX releases while it blocks.
    """

    def __init__(self, seconds: float, report: Callable[[str], None] = print, end: Callable[[int], None] = os._exit):
        """
        Args:
          seconds: between two beats before the step counts as hung; SLOW times that for what is no step. 0 is off.
          report: takes the stacks of all threads.
          end: called with HUNG after that; without any clean-up, because what hangs would hang in it too.
        """
        self._seconds, self._report, self._end = seconds, report, end
        self._watched: tuple[str, float, float] | None = None  # what, since when, for how long; None: not watching
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self) -> None:
        """A step is done, and the next one begins."""
        self._watched = ("a step", time.monotonic(), self._seconds)

    def renew(self) -> None:
        """What is being watched went on: its time begins again, with the limit that it has."""
        watched = self._watched
        if watched is not None:
            self._watched = (watched[0], time.monotonic(), watched[2])

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """What runs here may take SLOW times as long as a step; slow() again within it begins a new watch."""
        self._watched = (what, time.monotonic(), SLOW * self._seconds)
        try:
            yield
        finally:
            self.beat()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch what runs here."""
        self._watched = None
        try:
            yield
        finally:
            self.beat()

    def __enter__(self) -> "Watchdog":
        self._watched = ("the start", time.monotonic(), SLOW * self._seconds)
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            watched = self._watched
            if watched is None:
                continue
            what, since, limit = watched
            blocked = time.monotonic() - since
            if blocked > limit:
                speaker = threading.Thread(target=self._announce, args=(what, blocked), daemon=True)
                speaker.start()
                speaker.join(REPORT_SECONDS)
                self._end(HUNG)
                return

    def _announce(self, what: str, blocked: float) -> None:
        end = f"The hung run is given up: exit code {HUNG}"
        self._report(f"warning: {what} has not ended for {blocked:.0f} seconds. All threads:\n{all_stacks()}\n{end}")
        sys.stdout.flush()


def all_stacks() -> str:
    """The Python stack of every thread, each under the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f'thread "{names[ident] if ident in names else ident}":\n{"".join(traceback.format_stack(frame)).rstrip()}'
        for ident, frame in sys._current_frames().items()
    )
