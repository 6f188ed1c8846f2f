"""A step that does not return: say where every thread stands, and give up if asked to."""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

HUNG = 43  # exit code: a step hung and the watchdog ended the process; launchers start the run again


class Watchdog:
    """Waits for beat() once per step; the first beat starts it, so compiling the first step is not watched.

    A thread of its own does the waiting. It needs the interpreter's lock, which JAX gives up while it blocks.
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
          seconds: between two beats before the step counts as hung; 0 is off.
          abort: end the process with HUNG then, without any clean-up: what hangs would hang in it too.
          on_hang: called once per hang, from the watching thread, with the seconds since the last beat.
          report: takes the stacks of all threads, once per hang.
        """
        self._seconds, self._abort, self._on_hang, self._report = seconds, abort, on_hang, report
        self._last = None  # time of the last beat; None: not watching
        self._told = None  # the beat whose hang has been reported
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if seconds:
            self._thread.start()

    def beat(self) -> None:
        """A step is done."""
        self._last = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not watch what runs here (an evaluation, a checkpoint that is waited for); counts anew behind it."""
        watching = self._last is not None
        self._last = None
        try:
            yield
        finally:
            if watching:
                self.beat()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            last = self._last
            if last is None or last == self._told:
                continue
            blocked = time.monotonic() - last
            if blocked > self._seconds:
                self._told = last
                self._tell(blocked)

    def _tell(self, blocked: float) -> None:
        self._report(f"warning: no step finished for {blocked:.0f} seconds. All threads:\n{all_stacks()}")
        if self._on_hang is not None:
            self._on_hang(blocked)
        if self._abort:
            self._report(f"the hung step is given up: exit code {HUNG}")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(HUNG)


def all_stacks() -> str:
    """The Python stack of every thread, each under the thread's name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f'thread "{names[ident] if ident in names else ident}":\n{"".join(traceback.format_stack(frame)).rstrip()}'
        for ident, frame in sys._current_frames().items()
    )
