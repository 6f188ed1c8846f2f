"""How far a long command is: a line every ten seconds, with the time left."""

import datetime
import time
from collections.abc import Callable

from domino_jax.runtime.distributed import say

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts `total` pieces of work, of which `done` were done before; `report` takes the lines.

    What is over within SECONDS_BETWEEN_LINES prints nothing.
    """

    def __init__(self, label: str, total: int, done: int = 0, report: Callable[[str], None] = say):
        self.done = done
        self._label, self._total, self._first, self._report = label, total, done, report
        self._begin = self._printed = self._counted = time.monotonic()

    def advance(self, count: int, note: str = "") -> None:
        """Counts `count` more pieces, 0 to show the note alone; `note` is printed after the numbers."""
        self.done += count
        now = time.monotonic()
        if count:
            self._counted = now
        is_last = self.done == self._total and self._printed > self._begin
        if is_last or now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            self._report(f"{self._label} {self.done}/{self._total}  {note}  left {self.left()}")

    def left(self) -> str:
        """The time left as h:mm:ss; "?" before the first piece is done."""
        counted = self.done - self._first
        if not counted:
            return "?"
        each = (self._counted - self._begin) / counted
        seconds = max(each * (self._total - self.done) - (time.monotonic() - self._counted), 0.0)
        return str(datetime.timedelta(seconds=round(seconds)))
