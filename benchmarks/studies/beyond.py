"""Beyond the paper: heads of several ranks from one training, tables of tokens for a second target, combined drafters.

    python -m benchmarks.studies.beyond --workdir=/tmp/beyond --table=multiscale --head=domino --seeds=0,1,2
    python -m benchmarks.studies.beyond --workdir=/tmp/beyond --table=transfer --seeds=0,1,2
    python -m benchmarks.studies.beyond --workdir=/tmp/beyond --table=best --seeds=0,1,2 \\
        --variant="dpace train.dpace_alpha=0.5" --variant="deep train.dpace_alpha=0.5 drafter.num_layers=5"

multiscale: one training with nested ranks (train.rank_scales), decoded at each of its ranks (decode.head_rank), against
trainings at that rank alone and against the cut of a training without nesting. transfer: a Markov head's tables of
tokens, trained on the tiny target, as the start of a head for a smaller target of 12 layers, 96 wide, with the same
tokenizer (train.head_from); the script trains that target first. best: Domino against the drafters that --variant
describes (a name, then recipe keys with their values), at temperature 0 and 1, with the cost of their rounds.

All training rows are the target's own answers. Every training and decoding is a stage of a study (study.py): start the
command again to continue it. Times are measured last (drafter_timings.py) and need a machine with nothing else to do; τ
does not. --minutes=N saves and stops after that time with exit code 42. --only=NAME runs one training, in transfer
after the source and the backbone. Tables in one workdir share their stages, and multiscale those of
ablations.py. Any further --config.KEY=VALUE goes to every command. Writes a section of docs/beyond.md and a picture.
"""

import argparse
import json
import pathlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.document import put_section
from benchmarks.studies.ablation_tables import RECIPE_ROW, VARIANTS
from benchmarks.studies.beyond_tables import PICTURES, SECTIONS
from benchmarks.studies.study import (
    RECIPE,
    ROOT,
    Stage,
    Study,
    at_least,
    parse,
    parser_of,
    run_main,
    say_command,
    time_of,
)
from benchmarks.this_machine import conditions
from domino_jax.method.config import DrafterConfig
from domino_jax.method.names import DFLASH2, DOMINO, MARKOV, RANK_KEYS
from domino_jax.method.ranks import with_head_rank
from domino_jax.method.settings import BASELINE, DRAFT, TREE, supported_modes
from domino_jax.recipe.checks import load_recipe
from domino_jax.recipe.cli import check_key
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.figures import save
from domino_jax.training.metrics import read_rows
from domino_jax.weights import hf
from domino_jax.weights.drafter import head_table

PAGE = "beyond.md"
RANK = 64  # of the recipe's heads
SCALES = (0.25, 0.5, 1.0)
VANILLA = {"drafter.head": MARKOV, "drafter.markov_head_type": "vanilla"}
AT_THE_END = {"eval.every": 0}  # the table shows its end alone; the ablation's trainings are evaluated on the way
HEADS = {DOMINO: {}, MARKOV: VANILLA | AT_THE_END, DFLASH2: {"drafter.head": DFLASH2, **AT_THE_END}}
CHAIN = {"decode.modes": f"('{BASELINE}','{DRAFT}')"}
POINTS = 10  # of a curve of τ over the steps
# The target that takes the tables over: its shape, and the layers that its drafters tap.
SMALL, SMALL_TAPS = {"layers": 12, "width": 96}, "(1,3,5,8,10)"
TOKENIZER = ROOT / "assets" / "tiny_qwen3"
KNOWN_BY_HEART = 1e-12  # a learning rate that changes nothing

Changes = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parsed(arguments)
    for key in (key for changes in best_variants(options).values() for key in changes):
        check_key(load_recipe(str(RECIPE)), key, RECIPE.name)
    study = Study(options.workdir, overrides, options.minutes)
    study.answers()
    measured = TABLES[options.table](study, options)
    if options.only:
        print("--only: no table is written", flush=True)
        return
    own = [flag for flag in OWN_FLAGS[options.table] if flag != "variant"]
    flags = ["table", *own, "steps", "seeds"]
    command = say_command(
        "benchmarks.studies.beyond", options, flags, [f"--variant={shlex.quote(v)}" for v in options.variant]
    )
    recorded = {
        **measured,
        "table": name_of(options),
        "command": " ".join([command, *overrides]),
        "seeds": options.seeds,
        "steps": options.steps,
        "conditions": conditions(("jax", "flax", "optax")),
    }
    (study.workdir / f"beyond_{name_of(options)}.json").write_text(json.dumps(recorded, indent=1) + "\n")
    write(pathlib.Path(options.output), recorded)


def write(output: pathlib.Path, recorded: Mapping[str, Any]) -> None:
    """The section of one table in the page, and its picture."""
    name = recorded["table"]
    kind, image = name.split("_")[0], f"beyond_{name}.png"
    save(output, {image: PICTURES[kind](recorded)})
    text = SECTIONS[kind](recorded, image)
    put_section(output / PAGE, f"beyond {name}", text)
    print(text)


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__, steps=400)
    parser.add_argument("--table", choices=list(TABLES), default="multiscale", help="which comparison")
    parser.add_argument("--head", choices=list(HEADS), default=DOMINO, help="multiscale: of which head")
    parser.add_argument("--target_minutes", type=time_of, default=20.0, help="transfer: to train the smaller target")
    parser.add_argument(
        "--width", type=at_least(2), default=16, help="best: slots of a block, rows of the verifying pass"
    )
    parser.add_argument("--variant", type=variant_of, action="append", default=[], help="best: 'NAME KEY=VALUE ...'")
    options, overrides = parse(parser, arguments, names_of)
    if options.table == "best" and not options.variant:
        parser.error("--table=best compares Domino with --variant='NAME KEY=VALUE ...'; give at least one")
    for table, flags in OWN_FLAGS.items():
        given = [flag for flag in flags if getattr(options, flag) != parser.get_default(flag)]
        if given and table != options.table:
            parser.error(f"--{given[0]} is for --table={table}, and this is --table={options.table}; leave it out")
    names = [DOMINO, *(shlex.split(text)[0] for text in options.variant)]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        parser.error(f"two drafters are named {twice[0]}; domino is the recipe's own. Name each --variant differently")
    return options, overrides


def variant_of(text: str) -> str:
    """The text of a --variant, if it has the form: a name, then keys with values."""
    try:
        name, *changes = shlex.split(text) or [""]
    except ValueError:  # a quote without its end
        name, changes = "", []
    wrong = [change for change in changes if not re.fullmatch(r"[a-z_0-9.]+=.+", change)]
    if not re.fullmatch(r"[a-z][a-z_0-9]*", name) or wrong or not changes:
        raise argparse.ArgumentTypeError(f"{text!r} is no name and KEY=VALUE, as 'deep drafter.num_layers=5'")
    return text


def names_of(options: argparse.Namespace) -> list[str]:
    """The trainings of a table."""
    if options.table == "multiscale":
        nested, alone = nested_and_alone(options.head)
        return [nested[0], *(name for name, _ in alone.values())]
    return ["source", *small_variants("", "")] if options.table == "transfer" else list(best_variants(options))


def name_of(options: argparse.Namespace) -> str:
    return f"{options.table}_{options.head}" if options.table == "multiscale" else options.table


# ------------------------------------------------------------------------------------------------- several ranks


def nested_and_alone(head: str) -> tuple[tuple[str, Changes], dict[int, tuple[str, Changes]]]:
    """(name, changes) of the nested training, and of the training at each rank alone."""
    key, changes = f"drafter.{RANK_KEYS[head]}", HEADS[head]
    ranks = [round(scale * RANK) for scale in SCALES]
    alone = {rank: (f"{head}_rank{rank}", {**changes, key: rank}) for rank in ranks}
    if head == DOMINO:  # as the ablation's table of ranks has them
        names = {rank: RECIPE_ROW if rank == RANK else f"rank{rank}" for rank in ranks}
        alone = {rank: (name, VARIANTS[name].changes) for rank, name in names.items()}
    nested = {**alone[RANK][1], **AT_THE_END, "train.rank_scales": f"({','.join(map(str, SCALES))})"}
    return (f"{head}_nested", nested), alone


def multiscale(study: Study, options: argparse.Namespace) -> dict[str, Any]:
    (name, nested), alone = nested_and_alone(options.head)
    rows, found = {rank: {"nested": [], "alone": [], "cut": []} for rank in alone}, {}
    for seed in options.seeds:
        trainings = {name: nested, **dict(alone.values())}
        wanted = {one: changes for one, changes in trainings.items() if not options.only or one in options.only}
        runs = found[seed] = {one: study.train(one, changes, seed, options.steps) for one, changes in wanted.items()}
        if options.only:
            continue
        for rank, (one, _) in alone.items():
            rows[rank]["nested"].append(decoded(study, runs[name], rank))
            rows[rank]["cut"].append(decoded(study, runs[alone[RANK][0]], rank))
            rows[rank]["alone"].append(decoded(study, runs[one]))
            rows[rank]["head"] = head_sizes(runs[name], rank)
    if options.only:
        return {}
    seed = options.seeds[0]
    timed = {str(rank): found[seed][one] for rank, (one, _) in alone.items()}
    drafts = int(study.of_recipe("decode.num_drafts"))
    timings = study.timings(f"timings_{name_of(options)}", timed, drafts, nodes_of(study), seed)
    return {"head": options.head, "rank": RANK, "rows": rows, "timings": timings}


def decoded(study: Study, run: pathlib.Path, rank: int = 0) -> dict[str, Any]:
    """`chain_figures` of a decoding at temperature 0 with the head cut to `rank`; 0 or RANK: all that it has."""
    if rank in (0, RANK):
        return chain_figures(study.decode(f"{run.name}_chain", run, CHAIN))
    return chain_figures(study.decode(f"{run.name}_rank{rank}", run, {**CHAIN, "decode.head_rank": rank}))


def head_sizes(run: pathlib.Path, rank: int) -> dict[str, int]:
    """Parameters of the head at a rank, and the float32 bytes of it that a draft reads: of a token table one row, of
    the last matrix the candidates' rows where the head has candidates of its own."""
    raw = hf.read_config(run / "export")
    config = with_head_rank(DrafterConfig.from_dict(raw), rank)
    few = config.candidates(0)
    rows = {"predecessor": 1, **({"up": few} if few else {})}
    sizes = {entry.path: int(np.prod(entry.shape)) for entry in head_table(config)}
    read = sum(rows[path[1]] * config.head_rank if path[1] in rows else size for path, size in sizes.items())
    return {"parameters": sum(sizes.values()), "bytes": 4 * read}


def chain_figures(report: Mapping[str, Any], mode: str = DRAFT) -> dict[str, Any]:
    """What the tables show of a report's mode."""
    same = report["identical_outputs"][mode]
    return {"tau": report["modes"][mode]["tau_pooled"], **{key: same[key] for key in ("same", "of", "violations")}}


def nodes_of(study: Study) -> int:
    return int(study.of_recipe("decode.tree.nodes"))


# ------------------------------------------------------------------------------------------------- two targets


def transfer(study: Study, options: argparse.Namespace) -> dict[str, Any]:
    markov = common_markov()
    small = study.of_target("small", small_target(study, options.target_minutes))
    small.answers()
    every = max(1, options.steps // POINTS)
    often = {"eval.every": every, "checkpoint.every": every}
    curves: dict[str, list] = {}
    for seed in options.seeds:
        source = study.train("source", markov | AT_THE_END, seed, options.steps)
        backbone = small.train("backbone", small_variants("", "")["backbone"] | often, seed, options.steps)
        for name, changes in small_variants(str(source), str(backbone)).items():
            if options.only and name not in options.only:
                continue
            steps = 1 if name == "untrained" else options.steps
            run = small.train(name, changes | (often if steps > 1 else {}), seed, steps)
            rows = read_rows(run / "metrics.jsonl")
            points = [[row["step"], row["eval_tau"]] for row in rows if row.get("eval_tau") is not None]
            if not points:
                raise DominoError(f"{run} was never evaluated; leave out --config.eval.every, which this table sets.")
            curves.setdefault(name, []).append(points)
    return {"curves": curves, "target_minutes": options.target_minutes, **SMALL}


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
    rank = {f"drafter.{RANK_KEYS[MARKOV]}": RANK, "drafter.enable_confidence_head": False}
    return {**VANILLA, **rank, "train.loss": "cross_entropy", "train.lambda_start": 0.0}


def small_variants(source: str, backbone: str) -> dict[str, dict[str, Any]]:
    """The trainings on the smaller target, in the order in which they need each other.

    source: a drafter of the tiny target, whose tables are taken.  backbone: the training of that name.
    """
    markov, tables = common_markov(), {"train.head_from": source}
    alone = {**markov, "train.frozen_backbone": backbone}
    made = {
        "backbone": {"drafter.head": "none", "drafter.shift_label": True},
        "scratch": markov,
        "tables": markov | tables,
        "tables_frozen": markov | tables | {"train.frozen_tables": True},
        "alone_scratch": alone,
        "alone_tables": alone | tables,
        "untrained": alone | tables | {"train.learning_rate": KNOWN_BY_HEART},
    }
    return {name: {**changes, "drafter.target_layer_ids": SMALL_TAPS} for name, changes in made.items()}


# ------------------------------------------------------------------------------------------------ combinations


def best(study: Study, options: argparse.Namespace) -> dict[str, Any]:
    rows, runs = {}, {seed: {} for seed in options.seeds}
    for name, changes in best_variants(options).items():
        if options.only and name not in options.only:
            continue
        shown = dict(changes.items() - block_of(options.width).items())
        row = rows[name] = {"changes": shown, "greedy": [], "sampled": [], "trees": [], "sampled_trees": []}
        for seed, of_seed in runs.items():
            run = study.train(f"best_{name}_w{options.width}", changes | AT_THE_END, seed, options.steps)
            of_seed[name] = run
            if options.only:
                continue
            for chains, trees, temperature in (("greedy", "trees", 0.0), ("sampled", "sampled_trees", 1.0)):
                values = decoding(changes, options.width, temperature, seed)
                report = study.decode(f"{run.name}_T{temperature:g}", run, values)
                row[chains].append(chain_figures(report))
                row[trees] += [chain_figures(report, TREE)] if TREE in report["modes"] else []
    if options.only:
        return {}
    drafts, nodes = options.width - 1, nodes_of(study)
    timings = [
        study.timings(f"timings_best_seed{seed}", of_seed, drafts, nodes, seed) for seed, of_seed in runs.items()
    ]
    return {"width": options.width, "rows": rows, "timings": timings}


def best_variants(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By name what each drafter changes in the recipe; Domino as the recipe has it comes first."""
    block = block_of(options.width)
    given = [shlex.split(text) for text in options.variant]
    found = {name: block | dict(change.split("=", 1) for change in changes) for name, *changes in given}
    return {DOMINO: block, **found}


def block_of(width: int) -> dict[str, Any]:
    """Blocks as wide as the verifying pass, and γ in proportion to the public 7 for 16."""
    return {"drafter.block_size": width, "train.gamma": 7.0 * width / 16}


def decoding(changes: Changes, width: int, temperature: float, seed: int) -> dict[str, Any]:
    head = changes["drafter.head"] if "drafter.head" in changes else DOMINO
    modes = supported_modes((BASELINE, DRAFT, TREE), head)
    return {
        "decode.modes": "(" + "".join(f"'{mode}'," for mode in modes) + ")",
        "decode.num_drafts": width - 1,
        "decode.temperature": temperature,
        "decode.seed": seed,
    }


TABLES: dict[str, Callable[[Study, argparse.Namespace], dict[str, Any]]] = {
    "multiscale": multiscale,
    "transfer": transfer,
    "best": best,
}
OWN_FLAGS = {"multiscale": ["head"], "transfer": ["target_minutes"], "best": ["width", "variant"]}


if __name__ == "__main__":
    run_main(main)
