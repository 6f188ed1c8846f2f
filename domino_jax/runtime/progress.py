"""How far a long command is: a bar on a terminal, a line now and then in a log, with the time left."""

import time

import rich.console
import rich.progress
import rich.text

SECONDS_BETWEEN_LINES = 10.0
PATIENCE = 5.0  # seconds after which work is shown that is often over by then


def duration(seconds: float | None) -> str:
    """Seconds as h:mm:ss; "?" where they are not known."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class Progress:
    """Counts `total` pieces of work; `done` of them were done before. Nothing is shown in the first `after` seconds.

    Args:
        within: a display of other work, which gets a second bar until the end of this work.

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
        within: rich.progress.Progress | None = None,
    ):
        self._label, self._total, self._first, self._done, self._after = label, total, done, done, after
        self._begin = self._printed = self._counted = time.monotonic()
        self._console = console or rich.console.Console()
        self._bar, self._is_guest = within, within is not None
        if self._bar is None and self._console.is_terminal:
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
        self._done += count
        now = time.monotonic()
        if count:
            self._counted = now
        if now - self._begin < self._after:
            return
        if self._bar:
            self._bar.start()
            self._bar.update(self._task, completed=self._done, note=note)
        elif now - self._printed >= SECONDS_BETWEEN_LINES or self._done == self._total:
            self._printed = now
            text = f"{self._label} {self._done}/{self._total}  {note}  left {self._left(now)}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _left(self, now: float) -> str:
        done = self._done - self._first
        if not done:
            return duration(None)
        each = (self._counted - self._begin) / done
        return duration(max(each * (self._total - self._done) - (now - self._counted), 0.0))

    def __enter__(self) -> "Progress":
        if self._bar and not self._after:
            self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._is_guest:
            self._bar.remove_task(self._task)
        elif self._bar:
            self._bar.stop()


class TrainingBar(rich.progress.Progress):
    """The live display of a training run: the bar, and below it the numbers of the last logged step."""

    def __init__(self, total: int, done: int, console: rich.console.Console):
        self._numbers = rich.text.Text()
        super().__init__(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("left"),
            rich.progress.TimeRemainingColumn(),
            console=console,
        )
        self._run = self.add_task("training", total=total, completed=done)

    def show(self, step: int, numbers: str | None = None) -> None:
        """Moves the bar; the numbers stay as they are without new ones."""
        if numbers is not None:
            self._numbers = rich.text.Text(numbers)
        self.update(self._run, completed=step)

    def get_renderables(self):
        yield self.make_tasks_table(self.tasks)
        yield self._numbers
