"""Hung runs: print where every thread is, and end the process if requested."""

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

from domino_jax.runtime.preemption import ANNOUNCE_SECONDS, leave

HUNG = 43  # exit code: the run hung and the watchdog ended the process; every launcher starts the run again
# What may take longer than a step: the first step with its compilation, an evaluation, a save, the last wait.
SLOW = 10


class Watchdog:
    """Watches from `with` to its end: steps, each of which ends with beat(), and what is longer, in slow().

    A separate thread does the waiting. It needs the interpreter's lock, which JAX releases while it blocks. It takes
    no lock of the run, and it reports from another thread: a full pipe, or the file system of metrics.jsonl, may be
    what hangs.
    """

    def __init__(
        self,
        seconds: float,
        abort: bool = False,
        on_hang: Callable[[float], None] | None = None,
        report: Callable[[str], None] = print,
    ):
        """
        Args:
          seconds: between two beats before the step counts as hung; SLOW times that for what is no step. 0 is off.
          abort: end the process with HUNG then, without any clean-up: what hangs would hang in it too.
          on_hang: called once per hang, with the seconds since the last beat.
          report: takes the stacks of all threads, once per hang.
        """
        self._seconds, self._abort, self._report = seconds, abort, report
        self.on_hang = on_hang
        self._watched: tuple[str, float, float] | None = None  # what, since when, for how long; None: not watching
        self._reported = None  # the watch whose hang has been reported
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

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> "Watchdog":
        self._watched = ("the start", time.monotonic(), SLOW * self._seconds)
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            watched = self._watched
            if watched is None or watched is self._reported:
                continue
            what, since, limit = watched
            blocked = time.monotonic() - since
            if blocked > limit:
                self._reported = watched
                self._announce(what, blocked)

    def _announce(self, what: str, blocked: float) -> None:
        stacks = f"warning: {what} has not ended for {blocked:.0f} seconds. All threads:\n{all_stacks()}"
        # One thread for each: the metrics may hang where the terminal does not, and the other way round.
        speakers = [threading.Thread(target=self._report, args=(stacks,), daemon=True)]
        if self.on_hang is not None:
            speakers.append(threading.Thread(target=self.on_hang, args=(blocked,), daemon=True))
        for speaker in speakers:
            speaker.start()
        until = time.monotonic() + ANNOUNCE_SECONDS
        for speaker in speakers:
            speaker.join(max(0.0, until - time.monotonic()))
        if self._abort:
            leave(HUNG, lambda: self._report(f"the hung run is given up: exit code {HUNG}"))


def all_stacks() -> str:
    """The Python stack of every thread, each under the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f'thread "{names[ident] if ident in names else ident}":\n{"".join(traceback.format_stack(frame)).rstrip()}'
        for ident, frame in sys._current_frames().items()
    )
