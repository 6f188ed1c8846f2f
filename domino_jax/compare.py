"""Training runs side by side: their curves in one picture each, their last figures in a table, and what differs.

    python -m domino_jax.compare --runs=/tmp/first,/tmp/second --output=/tmp/compared

Reads the workdirs alone, finished or not, and needs no device. Writes loss.png, accept_len.png and tau.png; a picture
without data is left out.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.evals.compare import drafter_names
from domino_jax.evals.plots import COMPARED, plot_runs
from domino_jax.evals.report import output_folder, print_tables
from domino_jax.evals.tables import NOTHING
from domino_jax.recipe import cli
from domino_jax.runtime.differences import differences
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.remote import open_path
from domino_jax.training.metrics import read_rows
from domino_jax.weights import hf


def main(flags: cli.Flags) -> None:
    output = output_folder(flags.output)
    folders = [open_path(run).expanduser() for run in flags.runs]
    names = drafter_names([os.fspath(folder) for folder in folders], "--runs")
    rows = {name: rows_of(folder) for name, folder in zip(names, folders, strict=True)}
    recipes = [hf.read_json(folder, "config.json", kind="the workdir of a training run") for folder in folders]
    pictures = plot_runs(output, rows)
    print_tables([table_of(rows)])
    for name, recipe in zip(names[1:], recipes[1:], strict=True):
        for line in recipe_changes(recipes[0], recipe):
            print(f"{name}: {line}")
    print(f"{', '.join(pictures)} in {output}" if pictures else "no curve has data: no picture was written")


def rows_of(folder: Any) -> list[dict]:
    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        raise DominoError(f"--runs: {folder} has no metrics.jsonl with rows; name workdirs of `train`.")
    return rows


def table_of(runs: Mapping[str, Sequence[dict]]) -> list[list[str]]:
    """Cells, heading first, then a row a run: its last step, the last value of each curve, and the time it took."""
    table = [["run", "step", *(figure.axis for figure in COMPARED.values()), "minutes"]]
    for name, rows in runs.items():
        last = [figure.points(rows)[-1:] for figure in COMPARED.values()]
        cells = [f"{points[0][1]:.4g}" if points else NOTHING for points in last]
        seconds = max((row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)), default=0.0)
        table.append([name, str(max(row["step"] for row in rows)), *cells, f"{seconds / 60:.1f}"])
    return table


def recipe_changes(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """A line for each key of the recipe that has another value than in the first run."""
    pairs = differences(first, other).items()
    return [f"{key} {json.dumps(now)}, first run {json.dumps(before)}" for key, (before, now) in pairs]


if __name__ == "__main__":
    cli.run(main, required=("runs", "output"))
