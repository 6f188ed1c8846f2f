"""The output of a run: metrics.jsonl, TensorBoard, and lines on the console."""

import json
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from domino_jax.runtime.distributed import is_primary, say
from domino_jax.runtime.errors import DataError
from domino_jax.runtime.files import is_remote, write_whole
from domino_jax.runtime.journal import Journal, whole_lines
from domino_jax.runtime.json_files import parse_json
from domino_jax.runtime.progress import Progress
from domino_jax.runtime.remote import open_path

# The main figures, for the console, in this order, under these names and in these forms; metrics.jsonl holds all.
SHOWN = {
    "loss": "loss {:.4g}",
    "base_loss": "base {:.4g}",
    "final_loss": "final {:.4g}",
    "lambda_base": "λ {:.3g}",
    "grad_norm": "grad {:.3g}",
    "accept_len": "accept {:.3g}",
    "selector_loss": "selector {:.4g}",
    "selector_coverage": "coverage {:.1%}",
    "eval_tau": "τ {:.4g}",
    "eval_tau_per_prompt": "τ per prompt {:.4g}",
    "eval_tau_backbone": "τ backbone {:.4g}",
    "rows_per_second": "rows/s {:.4g}",
    "mfu": "MFU {:.1%}",
    "data_wait": "data wait {:.1%}",
    "skipped": "SKIPPED {:.0f}",
}

Value = float | Sequence[float]


class MetricsWriter:
    """One JSON row and one console line for each logged step of a run in `workdir`, both by process 0 alone.

    A row holds "step", values (numbers, or lists of numbers, which the console leaves out), and "seconds", the time
    that the run has taken so far, earlier starts included. The first row of a run that continues from step n drops the
    rows after n, so that no step is recorded twice; a start that has nothing to write changes nothing.
    """

    def __init__(self, workdir: str | os.PathLike, total_steps: int, start_step: int = 0):
        """
        Args:
            total_steps: T.  start_step: completed steps of the checkpoint that is continued.
        """
        self._folder = open_path(workdir)
        self._path = self._folder / "metrics.jsonl"
        self._start_step, self._total_steps = start_step, total_steps
        rows = read_rows(self._path) if is_primary() else []
        self._continued = [row for row in rows if row["step"] <= start_step]
        self._earlier_seconds = max((row["seconds"] for row in self._continued if "seconds" in row), default=0.0)
        self._start = time.monotonic()
        self._journal: Journal | None = None  # opened with TensorBoard's file for the first row
        self._curves: Any = None  # tensorboardX.SummaryWriter
        self._local: tempfile.TemporaryDirectory | None = None
        self._steps: Progress | None = None  # the steps before the first row hold the compilation

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Log one step. On a disk the row is then in the file; flush() does it in a bucket."""
        if not is_primary():
            return
        arrays = {key: np.asarray(value, np.float64) for key, value in values.items()}
        seconds = self._earlier_seconds + time.monotonic() - self._start
        if self._journal is None:
            self._open(step)
        # JSON has no NaN: a value that is none is null in the file.
        plain = {key: np.where(np.isfinite(array), array, None).tolist() for key, array in arrays.items()}
        self._journal.append({"step": int(step), **plain, "seconds": round(seconds, 3)})
        for key, array in arrays.items():
            for place, number in enumerate(array.flat, start=1):
                if math.isfinite(number):
                    self._curves.add_scalar(f"{key}/{place}" if array.ndim else key, number, step)
        self._steps.advance(step - self._steps.done)
        shown = [key for key in SHOWN if key in arrays and (arrays[key] or key != "skipped")]
        line = "  ".join(SHOWN[key].format(arrays[key]) for key in shown)
        say(f"step {step}/{self._total_steps}  {line}  left {self._steps.left()}")

    def _open(self, step: int) -> None:
        from tensorboardX import SummaryWriter  # here: it loads a cloud client where one is installed

        self._folder.mkdir(parents=True, exist_ok=True)
        rows = "".join(json.dumps(row) + "\n" for row in self._continued).encode()
        if self._path.exists() and self._path.read_bytes() != rows:  # there are later ones, or a torn one
            write_whole(self._path, rows)
        self._journal = Journal(self._path)
        self._steps = Progress("training", self._total_steps, step, report=lambda line: None)
        # tensorboardX's writer for buckets uploads everything again when it is deleted, and waits for minutes where the
        # bucket is lost. So its file is local, and flush() copies it.
        self._local = tempfile.TemporaryDirectory() if is_remote(self._folder) else None
        folder = self._local.name if self._local else os.fspath(self._folder / "tensorboard")
        # purge_step: points of that step and later ones, of an earlier start, are forgotten.
        first = self._start_step + 1
        name = {"logdir": folder, "filename_suffix": f".{first}"}
        self._curves = SummaryWriter(**name, purge_step=first, max_queue=1_000, flush_secs=30)

    def flush(self) -> None:
        """Returns once every row is in metrics.jsonl; TensorBoard's file may lack the last ones."""
        if self._journal:
            self._journal.flush()
            self._copy_curves()

    def _copy_curves(self) -> None:
        for file in pathlib.Path(self._local.name).iterdir() if self._local else ():
            (self._folder / "tensorboard" / file.name).write_bytes(file.read_bytes())

    def has(self, step: int, key: str) -> bool:
        """Whether an earlier start logged this value of this step; False in every process but the first."""
        return any(row["step"] == step and key in row for row in self._continued)

    def close(self) -> None:
        """Write what is still in memory."""
        if self._journal:
            self._journal.close()
            self._curves.close()
            self._copy_curves()
            self._journal = None

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


# ------------------------------------------------------------------------------------------------------ files


def read_rows(path: str | os.PathLike) -> list[dict]:
    """The rows of a metrics.jsonl, none when there is no file. A torn last line, left by a kill, is not a row."""
    file = open_path(path)
    rows = []
    for line in whole_lines(file) if file.exists() else ():
        try:
            row = parse_json(line.text)
        except ValueError:
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise DataError(f"{file}:{line.number}: no object with a step. Remove the line, or use another workdir.")
        rows.append(row)
    return rows
