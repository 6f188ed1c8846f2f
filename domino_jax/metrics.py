"""What a run says: metrics.jsonl, TensorBoard, and a progress bar on a terminal or plain lines in a log."""

import json
import math
import os
import pathlib
import time
from collections.abc import Mapping

import rich.console
import rich.progress
import tensorboardX

from domino_jax.errors import DataError

# What a console line shows, in this order and under these names; metrics.jsonl holds everything.
SHOWN = {
    "loss": "loss",
    "base_loss": "base",
    "final_loss": "final",
    "lambda_base": "λ",
    "learning_rate": "lr",
    "grad_norm": "grad",
    "accept_len": "accept",
    "base_accept_len": "base accept",
    "eval_tau": "τ",
}


class MetricsWriter:
    """One JSON row and one console line for each logged step of a run in `workdir`.

        with MetricsWriter(workdir, total_steps, start_step=restored_step) as metrics:
            metrics.write(step, {"loss": loss, ...})

    A row holds "step", the values given, and "seconds", the time this run has taken so far, earlier starts included. A
    run taken up from step n first drops the rows behind n, so that no step is ever told twice.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        total_steps: int,
        *,
        start_step: int = 0,
        console: rich.console.Console | None = None,
    ):
        folder = pathlib.Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        kept = truncate_rows(folder / "metrics.jsonl", start_step)
        self._total_steps = total_steps
        self._earlier_seconds = max((row["seconds"] for row in kept if "seconds" in row), default=0.0)
        self._start = time.monotonic()
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._board = tensorboardX.SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)
        self._console = console or rich.console.Console()
        self._progress = _progress(self._console) if self._console.is_terminal else None
        self._rate = _Rate(start_step, self._start)
        self._task = None
        if self._progress:
            self._task = self._progress.add_task("training", total=total_steps, completed=start_step, numbers="")
            self._progress.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step: to disk at once, so that a run that dies leaves what it said."""
        numbers = {key: float(value) for key, value in values.items()}
        seconds = self._earlier_seconds + time.monotonic() - self._start
        row = {"step": int(step), **numbers, "seconds": round(seconds, 3)}
        # JSON has no NaN: a value that is none is null in the file.
        json_row = {key: value if math.isfinite(value) else None for key, value in row.items()}
        self._file.write(json.dumps(json_row, allow_nan=False) + "\n")
        self._file.flush()
        for key, value in numbers.items():
            self._board.add_scalar(key, value, global_step=int(step))
        self._show(int(step), numbers)

    def advance(self, step: int) -> None:
        """Move the bar between logged steps; nothing in a log."""
        if self._progress:
            self._progress.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """A line of text beside the bar, or in the log."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _show(self, step: int, numbers: Mapping[str, float]) -> None:
        shown = "  ".join(f"{name} {numbers[key]:.4g}" for key, name in SHOWN.items() if key in numbers)
        if self._progress:
            self._progress.update(self._task, completed=step, numbers=shown)
        else:
            left = self._rate.seconds_left(step, self._total_steps, time.monotonic())
            self.say(f"step {step}/{self._total_steps}  {shown}  left {_clock(left)}")

    def close(self) -> None:
        """Stop the bar and write what is still in memory."""
        if self._progress:
            self._progress.stop()
        self._board.close()
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class _Rate:
    """Seconds a step takes, counted from the first logged step: the one before it holds the compilation."""

    def __init__(self, step: int, moment: float):
        self._step, self._moment, self._settled = step, moment, False

    def seconds_left(self, step: int, total: int, moment: float) -> float | None:
        taken = step - self._step
        each = (moment - self._moment) / taken if taken > 0 else None
        if not self._settled:
            self._step, self._moment, self._settled = step, moment, True
        return None if each is None else each * max(total - step, 0)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _progress(console: rich.console.Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("left"),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.fields[numbers]}", markup=False),
        console=console,
    )


def read_rows(path: str | os.PathLike) -> list[dict]:
    """The rows of a metrics.jsonl, none when there is no file. A torn last line, left by a kill, is not a row."""
    file = pathlib.Path(path)
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")
    lines.pop()  # what stands behind the last line's end: nothing, or the torn line
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{file}:{number}: the line is no JSON ({error}). Remove it, or start in another workdir."
            ) from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{file}:{number}: the line is no row with a step. Remove it, or start in another workdir.")
        rows.append(row)
    return rows


def truncate_rows(path: str | os.PathLike, last_step: int) -> list[dict]:
    """Drop the rows behind last_step (and a torn line) from a metrics.jsonl; returns those that stay."""
    file = pathlib.Path(path)
    kept = [row for row in read_rows(file) if row["step"] <= last_step]
    if file.exists():
        # Written beside it and renamed: a kill here must not cost the history.
        fresh = file.with_suffix(".jsonl.tmp")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        os.replace(fresh, file)
    return kept
