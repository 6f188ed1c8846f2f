"""Every draft head on the same data: trained on the tiny target for equal steps, then judged on the same answers.

    python -m benchmarks.studies.heads --workdir=/tmp/heads --seeds=0,1,2
    python -m benchmarks.studies.heads --workdir=/tmp/heads --small               # a test of the command

All drafters see the same rows, the target's own answers, in the same order, and block drafters of one seed the same
anchors; each has its published loss. They propose the same number of drafts a round, and τ is that of the held-out
prompts at temperature 0 and 1, where drafts share the target's noise (docs/method.md). study.py has the stages. Writes
a table to WORKDIR/tables.md and two CSV files; docs/results.md shows them. Any further --config.KEY=VALUE goes to every
command.
"""

from collections.abc import Sequence

from benchmarks.studies.study import Variant, compare, parse, parser_of, run_main

DRAFTS = 7  # of a round, as many as EAGLE-3 proposes
SHIFTED = {"drafter.block_size": DRAFTS}  # every slot predicts the token after it
UNSHIFTED = {"drafter.block_size": DRAFTS + 1}  # the first slot is the anchor and predicts nothing
RANK = 64  # of every head, as of the recipe's Domino head

VARIANTS = {
    "domino": Variant("Domino", {**SHIFTED, "drafter.head": "domino"}),
    "none": Variant("DFlash (no head)", {**UNSHIFTED, "drafter.head": "none"}),
    **{
        f"markov_{kind}": Variant(
            f"Markov, {kind}",
            {
                **SHIFTED,
                "drafter.head": "markov",
                "drafter.markov.head_type": kind,
                "drafter.markov.rank": RANK,
            },
        )
        for kind in ("vanilla", "gated", "rnn")
    },
    "dflash2": Variant("DFlash2", {**UNSHIFTED, "drafter.head": "dflash2", "drafter.dflash2.rank": RANK}),
    **{
        f"xpress_{passes}": Variant(
            f"xPress, {passes} passes",
            {**UNSHIFTED, "drafter.head": "xpress", "drafter.xpress.rank": RANK},
            trained_as="xpress",
            passes=passes,
        )
        for passes in (2, 4, 6)
    },
    "eagle3": Variant("EAGLE-3", {"drafter.head": "eagle3", "drafter.target_layer_ids": "(1,11,20)"}),
}
SMALL = ("domino", "none", "xpress_2", "eagle3")


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parse(parser_of(__doc__), arguments, lambda _: list(VARIANTS))
    variants = {name: VARIANTS[name] for name in (SMALL if options.small and not options.only else VARIANTS)}
    section = {"name": "heads", "title": "Draft heads on the same data", "module": "benchmarks.studies.heads"}
    section["says"] = f"Every drafter proposes {DRAFTS} drafts a round and has its published loss."
    compare(options, overrides, variants, section)


if __name__ == "__main__":
    run_main(main)
