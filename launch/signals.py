"""Ctrl-C, SIGTERM and SIGHUP to a launcher: noted here, and passed on by the loop that waits for what it started.

with signals.passed_on() as stop:
    ...                 # until it is over: stop.received is the first signal that came, stop.all holds every one
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.05


class Stop:
    """The signals that came to the launcher. The handler only notes them, so that none is lost or passed on twice."""

    def __init__(self) -> None:
        self.all: list[int] = []

    def __call__(self, number: int, frame: object) -> None:
        self.all.append(number)

    @property
    def received(self) -> int | None:
        """The first signal."""
        return self.all[0] if self.all else None

    def wait(self, seconds: float) -> bool:
        """Wait, but no longer than until a signal; whether one came."""
        end = time.monotonic() + seconds
        while not self.all and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
        return bool(self.all)


# A process has one table of handlers, so a launcher has one Stop; the inner blocks share that of the outer one.
_active: list[Stop] = []


@contextlib.contextmanager
def passed_on() -> Iterator[Stop]:
    """Note the signals while the block runs."""
    if _active:
        yield _active[0]
        return
    stop = Stop()
    _active.append(stop)
    # Signals that nohup or the shell had ignored stay ignored.
    heard = [number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _active.clear()
