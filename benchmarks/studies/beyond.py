"""Beyond the paper: Domino against drafters that combine its parts.

    python -m benchmarks.studies.beyond --workdir=/tmp/beyond --seeds=0,1,2 \\
        --variant="dpace train.dpace_alpha=0.5" --variant="deep train.dpace_alpha=0.5 drafter.num_layers=5"
    python -m benchmarks.studies.beyond --workdir=/tmp/beyond --small --variant=...  # a test of the command

--variant describes a drafter: a name, then recipe keys with their values. All are trained for the same steps and
decoded at temperature 0 and 1, and the cost of their rounds is measured.

All training rows are the target's own answers. Every training and decoding is a stage of a study (study.py): start the
command again to continue it. Times are measured last and need a machine with nothing else to do; τ does not.
--minutes=N saves and stops after that time with exit code 42. --only=NAME runs one training. Any further
--config.KEY=VALUE goes to every command. Writes a table to WORKDIR/tables.md and a CSV file; docs/results.md shows
them.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.studies.study import RECIPE, Study, parse, parser_of, run_main, write
from benchmarks.tables import changes_of, say_changes, with_spread
from domino_jax.method.kinds import KINDS
from domino_jax.method.settings import BASELINE, DRAFT, TREE, supported_modes
from domino_jax.recipe.cli import check_key
from domino_jax.recipe.loading import load_recipe
from domino_jax.runtime.errors import DominoError

AT_THE_END = {"eval.every": 0}  # the table shows its end alone
# A round that costs at most this times Domino's is as dear. Two drafters with the same program differed by up to 7 %
# with one seed, and by 1 % in the median of three.
EQUAL_COST = 1.02

Changes = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parsed(arguments)
    for key in (key for changes in best_variants(options).values() for key in changes):
        check_key(load_recipe(str(RECIPE)), key, RECIPE.name)
    study = Study(options.workdir, overrides, options.minutes)
    study.answers()
    section = best(study, options)
    if options.only:
        print("--only: no table is written", flush=True)
        return
    variants = [f"--variant={shlex.quote(variant)}" for variant in options.variant]
    section["name"] = "beyond best"
    write(options, [*variants, *overrides], "benchmarks.studies.beyond", ["width", "steps", "seeds"], section)


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__, steps=400)
    parser.add_argument("--width", type=int, default=16, help="slots of a block, rows of the verifying pass")
    parser.add_argument("--variant", action="append", default=[], help="'NAME KEY=VALUE ...'")
    options, overrides = parse(parser, arguments, lambda options: list(best_variants(options)))
    if not options.variant:
        parser.error("Domino is compared with --variant='NAME KEY=VALUE ...'; give at least one")
    return options, overrides


def best(study: Study, options: argparse.Namespace) -> dict[str, Any]:
    variants = best_variants(options)
    variants = {name: changes for name, changes in variants.items() if name in (options.only or variants)}
    taus: dict[tuple[str, str], list[float]] = {}
    timings = []
    for seed in options.seeds:
        runs = {}
        for name, changes in variants.items():
            runs[name] = study.train(f"best_{name}_w{options.width}", changes | AT_THE_END, seed, options.steps)
            for temperature in (0.0, 1.0) if not options.only else ():
                values = decoding(changes, options.width, temperature, seed)
                modes = study.decode(f"{runs[name].name}_T{temperature:g}", runs[name], values)["modes"]
                for mode in (mode for mode in (DRAFT, TREE) if mode in modes):
                    taus.setdefault((name, f"{mode}{temperature:g}"), []).append(modes[mode]["tau_pooled"])
        if not options.only:
            name = f"timings_best_seed{seed}"
            pair = (study.timings(f"{name}{kind}", runs, options.width - 1, study.nodes, T) for kind, T in TIMED)
            timings.append(tuple(pair))
    if options.only:
        return {}
    block = block_of(options.width)
    rows = [best_row(name, dict(changes.items() - block.items()), taus, timings) for name, changes in variants.items()]
    columns = {"drafter": "drafter", "changes": "changes", "tau, T = 0": "τ, T = 0", "tau, T = 1": "τ, T = 1"}
    columns |= {"change": "τ against Domino", "cost": "round ÷ Domino's", "speed": "tokens/s against Domino"}
    columns |= {"wins": "wins"}
    says = (
        f"Blocks of {options.width} slots, {options.width - 1} drafts per round. Times are medians of the seeds; the "
        "drafters of a seed alternated in one process. A drafter wins with a higher τ and more tokens per second than "
        f"Domino at both temperatures with every seed, and a round at most {EQUAL_COST - 1:.0%} dearer."
    )
    return {"title": "The best drafter we can make", "rows": rows, "columns": columns, "says": says}


def best_row(
    name: str, changed: Changes, taus: Mapping[tuple[str, str], Sequence[float]], timings: Sequence[tuple]
) -> dict[str, Any]:
    """One drafter beside Domino, seed by seed. timings: of each seed, at temperature 0 and 1."""
    kinds = (f"{DRAFT}0", f"{DRAFT}1")
    change = [changes_of(taus[name, kind], taus["domino", kind]) for kind in kinds]
    rates = [
        [[pair[at][one][DRAFT]["tokens_per_second"] for pair in timings] for one in (name, "domino")] for at in (0, 1)
    ]
    speed = [changes_of(*each) for each in rates]
    rounds = [[pair[0][one][DRAFT]["time_split"]["round"] for pair in timings] for one in (name, "domino")]
    cost = median(one / other for one, other in zip(*rounds, strict=True))
    row = {"drafter": name, "changes": ", ".join(f"{key} {value}" for key, value in sorted(changed.items())) or "none"}
    for mode, words in ((DRAFT, "tau"), (TREE, "tree")):
        for at in ("0", "1"):
            row[f"{words}, T = {at}"] = with_spread(taus.get((name, f"{mode}{at}"), ()))
    row |= {"change": "; ".join(map(say_changes, change)), "cost": cost, "speed": "; ".join(map(say_changes, speed))}
    row["wins"] = "–" if name == "domino" else "yes" if wins(change, speed, cost) else "no"
    chains = [pair[0][name][DRAFT] for pair in timings]
    row |= {"head_ms": median(one["time_split"]["head"] for one in chains)}
    return row | {"break_even": median(one["break_even_tau"] for one in chains), "tokens_s": median(rates[0][0])}


def wins(taus: Sequence[Sequence[float]], speeds: Sequence[Sequence[float]], cost: float) -> bool:
    """Whether a drafter beats Domino at equal round cost, with every seed. Changes are in per cent."""
    return cost <= EQUAL_COST and all(change > 0 for changes in (*taus, *speeds) for change in changes)


def best_variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By name what each drafter changes in the recipe; Domino as the recipe has it comes first."""
    block, variants = block_of(options.width), {}
    for name, *changes in map(shlex.split, options.variant):
        if name in ("domino", *variants):
            raise DominoError(f"two drafters are named {name}; domino is the recipe's. Name each --variant differently")
        if not changes or any("=" not in change for change in changes):
            raise DominoError(f"--variant={name!r} needs KEY=VALUE after its name, as in 'deep drafter.num_layers=5'")
        variants[name] = block | dict(change.split("=", 1) for change in changes)
    return {"domino": block, **variants}


def block_of(width: int) -> dict[str, Any]:
    """Blocks as wide as the verifying pass, and γ in proportion to the public 7 for 16."""
    return {"drafter.block_size": width, "train.gamma": 7.0 * width / 16}


def decoding(changes: Changes, width: int, temperature: float, seed: int) -> dict[str, Any]:
    head = changes["drafter.head"] if "drafter.head" in changes else "domino"
    modes = supported_modes((BASELINE, DRAFT, TREE), KINDS[head])
    return {
        "decode.modes": "(" + "".join(f"'{mode}'," for mode in modes) + ")",
        "decode.num_drafts": width - 1,
        "decode.temperature": temperature,
        "decode.seed": seed,
    }


TIMED = (("", 0.0), ("_sampled", 1.0))

if __name__ == "__main__":
    run_main(main)
