"""Drafters of the tiny target on equal ground: every head with its published loss, and what its parts are worth.

    python -m benchmarks.studies.heads --workdir=/tmp/heads --seeds=0,1,2 --rates=0.003,0.006,0.012
    python -m benchmarks.studies.heads --workdir=/tmp/heads --table=parts --seeds=0,1,2
    python -m benchmarks.studies.heads --workdir=/tmp/heads --variant='deep drafter.num_layers=5 train.gamma=7.0'
    python -m benchmarks.studies.heads --workdir=/tmp/heads --small               # a test of the command

All drafters see the same rows, the target's own answers, in the same order, and block drafters of one seed the same
anchors. τ is that of the held-out prompts at temperature 0 and 1, where drafts share the target's noise
(docs/method.md). --rates trains the first seed at each learning rate and keeps for each head the one with the highest τ
on other prompts, by which checkpoints are chosen too. --costs times steps and rounds. --table=parts has Domino without
its curriculum and with blocks of 4 and 16, beside plain DFlash drafters. With --variant the table has the recipe and
the trainings that are described: a name, then recipe keys with their values.
study.py has the stages. Writes a table to WORKDIR/tables.md and CSV files; docs/results.md shows them. Any further
--config.KEY=VALUE goes to every command.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.studies.study import Variant, compare, parse, parser_of, run_main
from domino_jax.runtime.errors import DominoError

DRAFTS = 7  # of a round, as many as EAGLE-3 proposes
RANK = 64  # of every head, as of the recipe's Domino head
GAMMAS = {4: 2.0, 8: 4.0, 16: 7.0}  # by the slots of a block; the public values for 8 and 16


def shifted(drafts: int = DRAFTS) -> dict[str, Any]:
    """Every slot predicts the token after it."""
    return {"drafter.block_size": drafts}


def unshifted(drafts: int = DRAFTS) -> dict[str, Any]:
    """The first slot is the anchor and predicts nothing."""
    return {"drafter.block_size": drafts + 1}


DOMINO = Variant("Domino", {**shifted(), "drafter.head": "domino"})
DFLASH = Variant("DFlash (no head)", {**unshifted(), "drafter.head": "none"})
HEADS = {
    "domino": DOMINO,
    "none": DFLASH,
    "none_deep": Variant("DFlash, one more layer", {**DFLASH.changes, "drafter.num_layers": 4}),
    **{
        f"markov_{kind}": Variant(
            f"Markov, {kind}",
            {
                **shifted(),
                "drafter.head": "markov",
                "drafter.markov.head_type": kind,
                "drafter.markov.rank": RANK,
            },
        )
        for kind in ("vanilla", "gated", "rnn")
    },
    "dflash2": Variant("DFlash2", {**unshifted(), "drafter.head": "dflash2", "drafter.dflash2.rank": RANK}),
    **{
        f"xpress_{passes}": Variant(
            f"xPress, {passes} passes",
            {**unshifted(), "drafter.head": "xpress", "drafter.xpress.rank": RANK},
            trained_as="xpress",
            passes=passes,
        )
        for passes in (2, 4, 6)
    },
    "eagle3": Variant("EAGLE-3", {"drafter.head": "eagle3", "drafter.target_layer_ids": "(1,11,20)"}),
}
SMALL = ("domino", "none", "xpress_2", "eagle3")


def blocks_of(slots: int) -> dict[str, Variant]:
    """Domino and plain DFlash that propose slots - 1 drafts a round."""
    gamma = {"train.gamma": GAMMAS[slots]}
    return {
        f"domino_b{slots}": Variant(
            f"Domino, blocks of {slots}", {**shifted(slots - 1), "drafter.head": "domino", **gamma}
        ),
        f"none_b{slots}": Variant(
            f"DFlash, blocks of {slots}", {**unshifted(slots - 1), "drafter.head": "none", **gamma}
        ),
    }


PARTS = {
    "domino": DOMINO,
    "none": DFLASH,
    "no_curriculum": Variant("Domino, no curriculum", {**DOMINO.changes, "train.lambda_start": 0.0}),
    **blocks_of(4),
    **blocks_of(16),
}
TABLES = {
    "heads": (HEADS, "Draft heads on the same data", f"{DRAFTS} drafts a round, each head with its published loss."),
    "parts": (PARTS, "What each part is worth", "Domino against plain DFlash, by the slots of a block."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--table", default="heads", choices=TABLES)
    parser.add_argument("--variant", action="append", default=[], help="'NAME KEY=VALUE ...': another table")
    options, overrides = parse(parser, arguments, lambda options: list(variants_of(options)))
    variants, title, says = table_of(options)
    if options.small and not options.only and not options.variant:
        variants = {name: variants[name] for name in SMALL}
    chosen = "".join(f" --variant={shlex.quote(text)}" for text in options.variant)
    name = "variants" if options.variant else options.table
    module = f"benchmarks.studies.heads{f' --table={name}' if name == 'parts' else ''}{chosen}"
    compare(options, overrides, variants, {"name": name, "title": title, "module": module, "says": says})


def table_of(options: argparse.Namespace) -> tuple[Mapping[str, Variant], str, str]:
    if not options.variant:
        return TABLES[options.table]
    return variants_of(options), "Variants of the recipe", "Each row changes one thing."


def variants_of(options: argparse.Namespace) -> Mapping[str, Variant]:
    """By name, those of --variant or of the chosen table."""
    if not options.variant:
        return TABLES[options.table][0]
    described = {"recipe": Variant("the recipe", {})}
    for name, *changes in map(shlex.split, options.variant):
        if name in HEADS or name in PARTS or name in described or any("=" not in change for change in changes):
            raise DominoError(
                f"--variant needs a new name and KEY=VALUE, as 'deep drafter.num_layers=5', not {name!r}."
            )
        described[name] = Variant(f"{name}: {' '.join(changes)}", dict(change.split("=", 1) for change in changes))
    return described


if __name__ == "__main__":
    run_main(main)
