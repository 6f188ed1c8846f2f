"""Beyond the paper: tables of tokens for a second target, combined drafters.

    python -m benchmarks.studies.beyond --workdir=/tmp/beyond --table=transfer --seeds=0,1,2
    python -m benchmarks.studies.beyond --workdir=/tmp/beyond --table=best --seeds=0,1,2 \\
        --variant="dpace train.dpace_alpha=0.5" --variant="deep train.dpace_alpha=0.5 drafter.num_layers=5"
    python -m benchmarks.studies.beyond --workdir=/tmp/beyond --small               # a test of the command

transfer: a Markov head's tables of tokens, trained on the tiny target, as the start of a head for a smaller target of
12 layers, 96 wide, with the same tokenizer (train.head_from); the script trains that target first. best: Domino against
the drafters that --variant describes (a name, then recipe keys with their values), at temperature 0 and 1, with the
cost of their rounds.

All training rows are the target's own answers. Every training and decoding is a stage of a study (study.py): start the
command again to continue it. Times are measured last and need a machine with nothing else to do; τ does not.
--minutes=N saves and stops after that time with exit code 42. --only=NAME runs one training, in transfer after the
source and the backbone. Tables in one workdir share their stages. Any further --config.KEY=VALUE goes to every
command. Writes a table to WORKDIR/tables.md and a CSV file; docs/results.md shows them.
"""

import argparse
import pathlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.studies.study import RECIPE, Stage, Study, parse, parser_of, run_main, write
from benchmarks.tables import ROOT, changes_of, say_changes, with_spread
from domino_jax.method.kinds import KINDS
from domino_jax.method.settings import BASELINE, DRAFT, TREE, supported_modes
from domino_jax.recipe.cli import check_key
from domino_jax.recipe.loading import load_recipe
from domino_jax.runtime.errors import DominoError
from domino_jax.training.metrics import read_rows

RANK = 64  # of the head
VANILLA = {"drafter.head": "markov", "drafter.markov.head_type": "vanilla"}
AT_THE_END = {"eval.every": 0}  # the table shows its end alone
POINTS = 10  # of a curve of τ over the steps
# The target that takes the tables over: its shape, and the layers that its drafters tap.
SMALL, SMALL_TAPS = {"layers": 12, "width": 96}, "(1,3,5,8,10)"
TOKENIZER = ROOT / "assets" / "tiny_qwen3"
NO_LEARNING = 1e-12  # a learning rate that changes nothing
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
    section = TABLES[options.table](study, options)
    if options.only:
        print("--only: no table is written", flush=True)
        return
    chosen = [flag for flag in OWN_FLAGS[options.table] if flag != "variant"]
    variants = [f"--variant={shlex.quote(variant)}" for variant in options.variant]
    names = ["table", *chosen, "steps", "seeds"]
    section["name"] = f"beyond {options.table}"
    write(options, [*variants, *overrides], "benchmarks.studies.beyond", names, section)


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__, steps=400)
    parser.add_argument("--table", choices=list(TABLES), default="transfer", help="which comparison")
    parser.add_argument("--target_minutes", type=float, default=20.0, help="transfer: to train the smaller target")
    parser.add_argument("--width", type=int, default=16, help="best: slots of a block, rows of the verifying pass")
    parser.add_argument("--variant", action="append", default=[], help="best: 'NAME KEY=VALUE ...'")
    options, overrides = parse(parser, arguments, names_of)
    if options.table == "best" and not options.variant:
        parser.error("--table=best compares Domino with --variant='NAME KEY=VALUE ...'; give at least one")
    for table, flags in OWN_FLAGS.items():
        other = [flag for flag in flags if getattr(options, flag) != parser.get_default(flag)]
        if other and table != options.table:
            parser.error(f"--{other[0]} is for --table={table}, and this is --table={options.table}; leave it out")
    return options, overrides


def names_of(options: argparse.Namespace) -> list[str]:
    """The trainings of a table."""
    return ["source", *small_variants("", "")] if options.table == "transfer" else list(best_variants(options))


# ------------------------------------------------------------------------------------------------- two targets


def transfer(study: Study, options: argparse.Namespace) -> dict[str, Any]:
    small = study.of_target("small", small_target(study, options.target_minutes))
    small.answers()
    every = max(1, options.steps // POINTS)
    often = {"eval.every": every, "checkpoint.every": every}
    curves: dict[str, list[dict[int, float]]] = {}
    for seed in options.seeds:
        source = study.train("source", common_markov() | AT_THE_END, seed, options.steps)
        backbone = small.train("backbone", small_variants("", "")["backbone"] | often, seed, options.steps)
        for name, changes in small_variants(str(source), str(backbone)).items():
            if options.only and name not in options.only:
                continue
            steps = 1 if name == "untrained" else options.steps
            run = small.train(name, changes | (often if steps > 1 else {}), seed, steps)
            rows = read_rows(run / "metrics.jsonl")
            points = {row["step"]: row["eval_tau"] for row in rows if row.get("eval_tau") is not None}
            if not points:
                raise DominoError(f"{run} was never evaluated; leave out --config.eval.every, which this table sets.")
            curves.setdefault(name, []).append(points)
    if options.only:
        return {}
    means = {name: mean_curve(each) for name, each in curves.items()}
    rows = []
    for name, points in means.items():
        base = "alone_scratch" if name in ("alone_tables", "alone_scratch", "untrained") else "scratch"
        row = {"training": name, "steps to the goal": steps_to(points, list(means[base].values())[-1])}
        if len(points) > 1:
            last = [[list(each.values())[-1] for each in curves[one]] for one in (name, base)]
            row["change"] = say_changes(changes_of(*last)) if name != base else ""
        rows.append(row | {"last": list(points.values())[-1]} | {f"after {step}": tau for step, tau in points.items()})
    columns = {"training": "training", "last": "last τ", "change": "against from scratch, by seed"}
    says = (
        "The head is the vanilla Markov head, whose tables know tokens alone, trained on the tiny target. The second "
        f"target has {SMALL['layers']} layers, {SMALL['width']} wide, the same tokenizer and corpus, and was trained "
        f"for {options.target_minutes:g} minutes. Alone: on a frozen backbone that was trained without a head. The "
        "goal is the last τ of the training from scratch, of the head alone where it is alone."
    )
    columns |= {"steps to the goal": "steps to the goal"}
    return {"title": "One head for two targets", "rows": rows, "columns": columns, "says": says}


def mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {step: fmean(each[step] for each in curves) for step in curves[0]}


def steps_to(curve: Mapping[int, float], goal: float) -> float | None:
    """Where the line through the points first reaches `goal`; None if it never does."""
    before = None
    for step, value in curve.items():
        if value >= goal:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (goal - before[1]) / (value - before[1])
        before = (step, value)
    return None


def small_target(study: Study, minutes: float) -> pathlib.Path:
    """The folder of the smaller target, trained on the corpus of the tiny one."""
    folder = study.workdir / "small_target"
    corpus = {"output": folder, "tokenizer": TOKENIZER}
    study.run(Stage("small_corpus", "assets.make_corpus", corpus, ("workdir", "small_corpus")))
    training = {"output": folder, "minutes": minutes, "checkpoint_minutes": 2, **SMALL}
    study.run(Stage("small_training", "assets.make_tiny_target", training, ("workdir", "small_corpus")))
    return folder


def common_markov() -> dict[str, Any]:
    """The vanilla head with the cross-entropy that needs no curriculum and no confidence head."""
    return {**VANILLA, "drafter.markov.rank": RANK, "train.loss": "cross_entropy", "train.lambda_start": 0.0}


def small_variants(source: str, backbone: str) -> dict[str, dict[str, Any]]:
    """The trainings on the smaller target, in the order in which they need each other.

    source: a drafter of the tiny target, whose tables are taken.  backbone: the training of that name.
    """
    markov, tables = common_markov(), {"train.head_from": source}
    alone = {**markov, "train.frozen_backbone": backbone}
    trainings = {
        "backbone": {"drafter.head": "none", "drafter.shift_label": True},
        "scratch": markov,
        "tables": markov | tables,
        "alone_scratch": alone,
        "alone_tables": alone | tables,
        "untrained": alone | tables | {"train.learning_rate": NO_LEARNING},
    }
    return {name: {**changes, "drafter.target_layer_ids": SMALL_TAPS} for name, changes in trainings.items()}


# ------------------------------------------------------------------------------------------------ combinations


def best(study: Study, options: argparse.Namespace) -> dict[str, Any]:
    names = options.only or names_of(options)
    variants = {name: changes for name, changes in best_variants(options).items() if name in names}
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
TABLES: dict[str, Callable[[Study, argparse.Namespace], dict[str, Any]]] = {
    "transfer": transfer,
    "best": best,
}
OWN_FLAGS = {"transfer": ["target_minutes"], "best": ["width", "variant"]}

if __name__ == "__main__":
    run_main(main)
