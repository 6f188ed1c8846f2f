"""Drafters of the tiny target on equal ground: every head with its published loss, and what parts of Domino are worth.

    python -m benchmarks.studies.heads --workdir=/tmp/heads --seeds=0,1,2 --rates=0.0015,0.003,0.006,0.012,0.024
    python -m benchmarks.studies.heads --workdir=/tmp/heads --table=parts --seeds=0,1,2
    python -m benchmarks.studies.heads --workdir=/tmp/heads --small               # a test of the command

All drafters see the same rows, the target's own answers, in the same order, and block drafters of one seed the same
anchors. τ is that of the held-out prompts at temperature 0 and 1, where drafts share the target's noise
(docs/method.md). --rates searches for each head the learning rate with the highest τ on other prompts, by which
checkpoints are chosen too, with the first seed. --costs times steps and rounds. --table=parts has Domino without its
curriculum, Domino and plain DFlash with blocks of 4 and 16, and Markov heads that learn from cross-entropy.
--table=leaders has the heads that no other one leads for sure, for more seeds. study.py has the stages. Writes a table
to WORKDIR/tables.md and CSV files; docs/results.md shows them. Any further --config.KEY=VALUE goes to every command.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.studies.study import Variant, compare, parse, parser_of, run_main

DRAFTS = 7  # of a round, as many as EAGLE-3 proposes
RANK = 64  # of every head, as of the recipe's Domino head
GAMMAS = {4: 2.0, 8: 4.0, 16: 7.0}  # by the slots of a block; the public values for 8 and 16


def shifted(drafts: int = DRAFTS) -> dict[str, Any]:
    """Every slot predicts the token after it."""
    return {"drafter.block_size": drafts}


def unshifted(drafts: int = DRAFTS) -> dict[str, Any]:
    """The first slot is the anchor and predicts nothing."""
    return {"drafter.block_size": drafts + 1}


def markov(kind: str) -> Variant:
    changes = {"drafter.head": "markov", "drafter.markov.head_type": kind, "drafter.markov.rank": RANK}
    return Variant(f"Markov, {kind}", {**shifted(), **changes})


def with_cross_entropy(one: Variant) -> Variant:
    """The same, trained with cross-entropy in place of its head's published loss."""
    changes = {**one.changes, "train.loss": "cross_entropy"}
    return dataclasses.replace(one, title=f"{one.title}, cross-entropy", changes=changes)


DOMINO = Variant("Domino", {**shifted(), "drafter.head": "domino"})
DFLASH = Variant("DFlash (no head)", {**unshifted(), "drafter.head": "none"})
HEADS = {
    "domino": DOMINO,
    "none": DFLASH,
    "none_deep": Variant("DFlash, one more layer", {**DFLASH.changes, "drafter.num_layers": 4}, rate_of="none"),
    **{f"markov_{kind}": markov(kind) for kind in ("vanilla", "gated", "rnn")},
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
            f"Domino, blocks of {slots}",
            {**shifted(slots - 1), "drafter.head": "domino", **gamma},
            rate_of="domino",
        ),
        f"none_b{slots}": Variant(
            f"DFlash, blocks of {slots}",
            {**unshifted(slots - 1), "drafter.head": "none", **gamma},
            rate_of="none",
        ),
    }


PARTS = {
    "domino": DOMINO,
    "none": DFLASH,
    "no_curriculum": Variant("Domino, no curriculum", {**DOMINO.changes, "train.lambda_start": 0.0}, rate_of="domino"),
    **blocks_of(4),
    **blocks_of(16),
    **{f"markov_{kind}_ce": with_cross_entropy(markov(kind)) for kind in ("vanilla", "rnn")},
}
LEADERS = {
    "domino": DOMINO,
    "dflash2": HEADS["dflash2"],
    **{name: PARTS[name] for name in ("markov_vanilla_ce", "markov_rnn_ce")},
}
TABLES = {
    "heads": (HEADS, "Draft heads on the same data", f"{DRAFTS} drafts a round, each head with its published loss."),
    "parts": (
        PARTS,
        "What each part is worth",
        "Domino without its curriculum, both by the slots of a block, and Markov heads that learn from cross-entropy.",
    ),
    "leaders": (LEADERS, "The best four with more seeds", "The heads that no other one leads for sure."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--table", default="heads", choices=TABLES)
    options, overrides = parse(parser, arguments, lambda options: list(TABLES[options.table][0]))
    variants, title, says = TABLES[options.table]
    if options.small and not options.only:
        variants = {name: variants[name] for name in SMALL}
    module = f"benchmarks.studies.heads{'' if options.table == 'heads' else f' --table={options.table}'}"
    compare(options, overrides, variants, {"name": options.table, "title": title, "module": module, "says": says})


if __name__ == "__main__":
    run_main(main)
