"""How far a long command is: a bar on a terminal, a line now and then in a log, with the time left."""

import datetime
import time

import rich.console
import rich.progress

from domino_jax.runtime.distributed import is_primary

SECONDS_BETWEEN_LINES = 10.0
PATIENCE = 5.0  # seconds after which work is shown that is often over by then


class Progress:
    """Counts `total` pieces of work; `done` of them were done before. Nothing is shown in the first `after` seconds.

    Args:
        console: where it is shown; None: that of the first process.
        bar: show a bar on a terminal.  lines: print a line now and then where there is no bar.

    with Progress("decode", total=64) as progress:
        progress.advance(8, "1,200 tokens/s")
    """

    def __init__(
        self,
        label: str,
        total: int,
        done: int = 0,
        console: rich.console.Console | None = None,
        after: float = 0.0,
        bar: bool = True,
        lines: bool = True,
    ):
        self.done = done
        self._label, self._total, self._first, self._after, self._lines = label, total, done, after, lines
        self._begin = self._printed = self._counted = time.monotonic()
        self._console = console or rich.console.Console(quiet=not is_primary())
        self._bar = None
        if bar and self._console.is_terminal:
            columns = (
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("left"),
                rich.progress.TimeRemainingColumn(),
                rich.progress.TextColumn("{task.fields[note]}", markup=False),
            )
            # Transient: only the result stays on the screen.
            self._bar = rich.progress.Progress(*columns, console=self._console, transient=True)
        if self._bar:
            self._task = self._bar.add_task(label, total=total, completed=done, note="")

    def advance(self, count: int, note: str = "") -> None:
        """Counts `count` more pieces, 0 to show the note alone; `note` is printed after the numbers."""
        self.done += count
        now = time.monotonic()
        if count:
            self._counted = now
        if now - self._begin < self._after:
            return
        if self._bar:
            self._bar.start()
            self._bar.update(self._task, completed=self.done, note=note)
        elif self._lines and (now - self._printed >= SECONDS_BETWEEN_LINES or self.done == self._total):
            self._printed = now
            text = f"{self._label} {self.done}/{self._total}  {note}  left {self.left()}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def left(self) -> str:
        """The time left as h:mm:ss; "?" before the first piece is done."""
        counted = self.done - self._first
        if not counted:
            return "?"
        each = (self._counted - self._begin) / counted
        seconds = max(each * (self._total - self.done) - (time.monotonic() - self._counted), 0.0)
        return str(datetime.timedelta(seconds=round(seconds)))

    def __enter__(self) -> "Progress":
        if self._bar and not self._after:
            self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar off the screen."""
        if self._bar:
            self._bar.stop()
