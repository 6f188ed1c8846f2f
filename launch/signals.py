"""Ctrl-C, SIGTERM and SIGHUP to a launcher: passed on to what it started, which is waited for.

with signals.passed_on() as stop:
    child = ...
    with stop.to(child.send_signal):
        ...                 # until child.poll() returns a code; stop.received is the signal that came, or None
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.05


class Stop:
    """What came to the launcher, and whom it is passed on to."""

    def __init__(self) -> None:
        self.received: int | None = None  # the first signal
        self._targets: list[Callable[[int], None]] = []

    def __call__(self, number: int, frame: object) -> None:
        self.received = self.received or number
        for target in self._targets:
            target(number)

    @contextlib.contextmanager
    def to(self, *targets: Callable[[int], None]) -> Iterator[None]:
        """Pass signals on to these while the block runs, and the one that came before it."""
        self._targets += targets
        if self.received:
            for target in targets:
                target(self.received)
        try:
            yield
        finally:
            del self._targets[len(self._targets) - len(targets) :]

    def wait(self, seconds: float) -> bool:
        """Wait, but no longer than until a signal; whether one came."""
        end = time.monotonic() + seconds
        while not self.received and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, POLL_SECONDS))
        return self.received is not None


# A process has one table of handlers, so a launcher has one Stop; the inner blocks share that of the outer one.
_active: list[Stop] = []


@contextlib.contextmanager
def passed_on() -> Iterator[Stop]:
    if _active:
        yield _active[0]
        return
    stop = Stop()
    _active.append(stop)
    # What nohup or the shell had ignored stays ignored.
    heard = [number for number in NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _active.clear()
