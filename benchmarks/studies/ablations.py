"""The gain of a change of the recipe on the tiny model, from trainings that differ in nothing else.

    python -m benchmarks.studies.ablations --workdir=/tmp/ablation --seeds=0,1,2
    python -m benchmarks.studies.ablations --workdir=/tmp/ablation --variant='deep drafter.num_layers=5 train.gamma=7.0'
    python -m benchmarks.studies.ablations --workdir=/tmp/ablation --small               # a test of the command

The table has plain DFlash, Domino trained on its final loss alone (λ = 0 throughout) and Domino with the curriculum.
With --variant it has the recipe and the trainings that are described: a name, then recipe keys with their values. The
target answers the training prompts once. Each training is then a real run of domino_jax.train on those rows, whose
evaluation measures τ. The script writes a table to WORKDIR/tables.md and a CSV file; docs/results.md shows them. Start
it again after an interruption: finished runs are reused, also by other tables in the same workdir, and an unfinished
one continues from its checkpoint. --minutes=N saves and stops after that time with exit code 42. --only=NAME runs one
training of the table. Any further --config.KEY=VALUE goes to every run.
"""

import argparse
import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.studies.study import Study, parse, parser_of, run_main, write
from benchmarks.tables import changes_of, say_changes, with_spread
from domino_jax.runtime.errors import DominoError
from domino_jax.training.metrics import read_rows

RECIPE_ROW = "curriculum"  # the tiny recipe without a change

# Name → title and what the training changes in the recipe.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # Shifted too, where the public DFlash drafters are not: all predict the same tokens of the same anchors, so that
    # their base losses can be compared.
    "dflash": ("plain DFlash", {"drafter.head": "none", "drafter.shift_label": True}),
    "no_curriculum": ("Domino, λ = 0", {"train.lambda_start": 0.0}),
    RECIPE_ROW: ("the recipe: Domino, λ 1 → 0, 3 layers, blocks of 8, γ 4", {}),
}
EVALUATED, LOSSES = ("tau", "tau_per_prompt", "tau_backbone"), ("base_loss", "final_loss")
COLUMNS = {"training": "training", "tau ± spread": "τ", "change": "τ against the recipe, by seed"}
COLUMNS |= {"tau_backbone": "τ of its backbone", "base_loss": "base loss", "final_loss": "final loss"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, steps=400)
    parser.add_argument("--variant", action="append", default=[], help="'NAME KEY=VALUE ...': another table")
    options, overrides = parse(parser, arguments, lambda options: list(trainings(options)))
    table = trainings(options)
    study = Study(options.workdir, overrides, options.minutes)
    study.answers()
    figures: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:
        for name in options.only or table:
            folder = study.train(name, table[name][1], seed, options.steps)
            figures.setdefault(name, []).append(figures_of(folder))
    if options.only:
        print("--only: no table is written", flush=True)
        return
    section = {
        "name": "ablation variants" if options.variant else "ablation head",
        "title": "Variants of the recipe" if options.variant else "The head and the curriculum",
        "rows": [row_of(table[name][0], runs, figures[RECIPE_ROW]) for name, runs in figures.items()],
        "columns": COLUMNS,
        "says": "Losses are means over the last tenth of the steps.",
    }
    chosen = [f"--variant={shlex.quote(text)}" for text in options.variant]
    write(options, [*chosen, *overrides], "benchmarks.studies.ablations", ["steps", "seeds"], section)


def trainings(options: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → title and changes, of --variant or of the usual table."""
    if not options.variant:
        return VARIANTS
    described = {RECIPE_ROW: VARIANTS[RECIPE_ROW]}
    for name, *changes in map(shlex.split, options.variant):
        if name in VARIANTS or name in described or not changes or any("=" not in change for change in changes):
            raise DominoError(
                f"--variant needs a new name and KEY=VALUE, as 'deep drafter.num_layers=5', not {name!r}."
            )
        described[name] = (f"{name}: {' '.join(changes)}", dict(change.split("=", 1) for change in changes))
    return described


def figures_of(folder: pathlib.Path) -> dict[str, float]:
    """The last evaluation of a run, and the losses that its head logs as means over the last tenth of the steps."""
    rows = read_rows(folder / "metrics.jsonl")
    evaluated = [row for row in rows if row.get("eval_tau") is not None][-1]
    trained = [row for row in rows if "loss" in row]
    late = [row for row in trained if row["step"] > 0.9 * trained[-1]["step"]]
    figures = {key: evaluated[f"eval_{key}"] for key in EVALUATED if f"eval_{key}" in evaluated}
    return figures | {key: statistics.fmean(row[key] for row in late) for key in LOSSES if key in late[0]}


def row_of(title: str, runs: Sequence[Mapping[str, float]], recipe: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The means of the seeds, and τ against the recipe's seed by seed: a seed gives every row the same order and
    anchors, so much of the spread between seeds is common to all rows and says nothing about their differences."""
    taus = [run["tau"] for run in runs]
    change = changes_of(taus, [run["tau"] for run in recipe])
    return {
        "training": title,
        "tau ± spread": with_spread(taus, ".3f"),
        "change": say_changes(change) if any(change) else "",
        **{key: statistics.fmean(run[key] for run in runs) for key in runs[0]},
    }


if __name__ == "__main__":
    run_main(main)
