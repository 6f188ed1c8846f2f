"""The gain of a change of the recipe on the tiny model, from trainings that differ in nothing else.

    python -m benchmarks.studies.ablations --workdir=/tmp/ablation --seeds=0,1,2
    python -m benchmarks.studies.ablations --workdir=/tmp/ablation --variant='deep drafter.num_layers=5 train.gamma=7.0'
    python -m benchmarks.studies.ablations --workdir=/tmp/ablation --small               # a test of the command

The table has the recipe, plain DFlash, and Domino trained on its final loss alone (λ = 0 throughout). With --variant it
has the recipe and the trainings that are described: a name, then recipe keys with their values. study.py has the
stages. Writes a table to WORKDIR/tables.md and two CSV files; docs/results.md shows them. Any further
--config.KEY=VALUE goes to every command.
"""

import argparse
import shlex
from collections.abc import Sequence

from benchmarks.studies.study import Variant, compare, parse, parser_of, run_main
from domino_jax.runtime.errors import DominoError

RECIPE_ROW = {"recipe": Variant("the recipe", {})}
VARIANTS = RECIPE_ROW | {
    # Shifted too, where the public DFlash drafters are not: all predict the same tokens of the same anchors.
    "dflash": Variant("plain DFlash", {"drafter.head": "none", "drafter.shift_label": True}),
    "no_curriculum": Variant("Domino, λ = 0", {"train.lambda_start": 0.0}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--variant", action="append", default=[], help="'NAME KEY=VALUE ...': another table")
    options, overrides = parse(parser, arguments, lambda options: list(variants_of(options)))
    section = {"name": "ablations_head", "title": "The head and the curriculum", "says": "Each row changes one thing."}
    if options.variant:
        section |= {"name": "ablations_variants", "title": "Variants of the recipe"}
    chosen = "".join(f" --variant={shlex.quote(text)}" for text in options.variant)
    section["module"] = f"benchmarks.studies.ablations{chosen}"
    compare(options, overrides, variants_of(options), section)


def variants_of(options: argparse.Namespace) -> dict[str, Variant]:
    """By name, those of --variant or of the usual table."""
    if not options.variant:
        return VARIANTS
    described = dict(RECIPE_ROW)
    for name, *changes in map(shlex.split, options.variant):
        if name in VARIANTS or name in described or not changes or any("=" not in change for change in changes):
            raise DominoError(
                f"--variant needs a new name and KEY=VALUE, as 'deep drafter.num_layers=5', not {name!r}."
            )
        described[name] = Variant(f"{name}: {' '.join(changes)}", dict(change.split("=", 1) for change in changes))
    return described


if __name__ == "__main__":
    run_main(main)
