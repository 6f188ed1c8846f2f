"""Every draft head on the same data: all drafters of an arm, trained and decoded on the tiny target.

    python -m benchmarks.studies.heads --workdir=/tmp/heads --arm=b --seeds=0,1,2
    python -m benchmarks.studies.heads --workdir=/tmp/heads --small               # a test of the command

Arms (head_variants.py): a, heads alone on frozen backbones; b, everything trained for equal steps; c, everything
trained for equal time; d, everything trained for equal supervised predictions. All see the same rows, the target's own
answers, in the same order, and block drafters of one seed the same anchors. Each trained drafter is decoded on held-out
prompts at temperature 0 and 1 with the same verify width, as a chain and as a tree, and at its published number of
drafts; plain decoding runs beside each. At the end all drafters of the first seed are timed in one process; delete
WORKDIR/timings_*.json to time them again. Writes a table to WORKDIR/tables.md and a CSV
file; docs/results.md shows them.

Every training and decoding is a stage of a study (study.py): start the command again to continue it. --minutes=N saves
and stops after that time with exit code 42, --only=NAMES makes a table of these drafters alone. Arms in one workdir
share their stages. Any further --config.KEY=VALUE goes to every command.

Temperature 1 draws from the target's own distribution by noise that drafts and target share (docs/method.md); the
training seed is the decoding seed.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import shutil
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.studies.head_variants import ARMS, BY_CLOCK, BY_PREDICTIONS, HeadVariant, variants
from benchmarks.studies.study import Study, parse, parser_of, run_main, write
from benchmarks.tables import spread, with_spread
from domino_jax.decoding.settings import BACKBONE, BASELINE, DRAFT, TREE
from domino_jax.evals.bootstrap import interval, pooled
from domino_jax.runtime.errors import DataError
from domino_jax.training.metrics import read_rows
from domino_jax.weights import hf

PILOT_STEPS = 40  # of the runs that measure seconds per step
ALIKE = 0.01  # a number of predictions per step that differs by less is the same
TEMPERATURES = {"t0": 0.0, "t1": 1.0}
SMALL_VARIANTS = ("none", "domino", "xpress_2", "eagle3")
COLUMNS = {"drafter": "drafter", "tau, T = 0": "τ, T = 0", "tau, T = 1": "τ, T = 1", "tree, T = 0": "τ of a tree"}
COLUMNS |= {"tflops": "training TFLOPs", "break_even": "break-even τ", "speedup": "speed-up"}


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parsed(arguments)
    arm = ARMS[options.arm]
    study = Comparison(options, overrides)
    drafters = {name: one for name, one in variants(options.width).items() if name in arm.variants}
    if options.small:
        drafters = {name: one for name, one in drafters.items() if name in SMALL_VARIANTS}
    refuse_shared_prompts(study)
    if options.only:
        # Domino's time and predictions are the measure in the arms that are not of equal steps.
        drafters = {name: one for name, one in drafters.items() if name in {"domino", *options.only}}
    if arm.equal == BY_CLOCK:
        drafters = by_clock(study, drafters)
    elif arm.equal == BY_PREDICTIONS:
        drafters = by_predictions(study, drafters)
    drafters = {name: drafters[name] for name in options.only or drafters}
    by_name = {name: [study.measure(name, one, seed) for seed in options.seeds] for name, one in drafters.items()}
    runs = {name: study.train(name, one, options.seeds[0]) for name, one in drafters.items()}
    timings = study.timings(f"timings_{options.arm}", runs, options.width - 1, options.width)
    sampled = study.timings(f"timings_{options.arm}_sampled", runs, options.width - 1, options.width, 1.0)
    rows = [
        {"drafter": drafters[name].title, **row_of(seeds), **timing_columns(timings[name], sampled[name])}
        for name, seeds in by_name.items()
    ]
    section = {"name": f"heads {options.arm}", "title": arm.title, "rows": rows, "columns": COLUMNS}
    section["says"] = f"{arm.says} The verifying pass has {options.width} rows. {equality(by_name)}"
    timed = ["train_seconds"] if options.train_seconds else []
    names = ["arm", "width", "steps", *timed, "prompts", "seeds"]
    write(options, overrides, "benchmarks.studies.heads", names, section)


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__, steps=250)
    parser.add_argument("--arm", choices=list(ARMS), default="b")
    parser.add_argument("--width", type=int, default=16, help="rows of the verifying pass; blocks have as many slots")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts to decode")
    parser.add_argument("--train_seconds", type=float, default=0.0, help="arm c; 0: what Domino needs for --steps")
    options, overrides = parse(parser, arguments, lambda options: ARMS[options.arm].variants)
    if options.small:
        options.width, options.prompts = 4, 1
    return options, overrides


def refuse_shared_prompts(study: "Comparison") -> None:
    """Answers the training prompts.

    Raises:
        DataError: a held-out prompt is also a training prompt.
    """
    study.answers()
    file = study.of_recipe("eval.prompts")
    files = (study.of_recipe("data.train"), file)
    trained, held_out = (set(pathlib.Path(name).read_text().splitlines()) for name in files)
    both = {prompt_of(line) for line in trained} & {prompt_of(line) for line in held_out}
    if both:
        raise DataError(
            f"{len(both)} prompts of {file} are training prompts as well, so τ would be of learnt answers."
            "\nName other prompts with --config.eval.prompts=FILE.jsonl."
        )


def prompt_of(line: str) -> str:
    row = json.loads(line)
    return json.dumps({key: value for key, value in row.items() if key in ("messages", "prompt", "token_ids")})


class Comparison(Study):
    """The stages of all drafters, and the figures of each."""

    def __init__(self, options: argparse.Namespace, overrides: Sequence[str]):
        super().__init__(options.workdir, overrides, options.minutes)
        self.options = options

    def train(self, name: str, one: HeadVariant, seed: int, **changes: Any) -> pathlib.Path:
        values = {**one.changes, "train.log_every": max(1, self.steps(one) // 50), "eval.num_prompts": 12, **changes}
        if one.backbone:
            backbone = variants(self.options.width)[one.backbone]
            values["train.frozen_backbone"] = self.train(one.backbone, backbone, seed)
        name = f"{one.trained_as or name}_w{self.options.width}"
        run = super().train(name, values, seed, self.steps(one))
        return in_passes(run, one.passes) if one.passes else run

    def steps(self, one: HeadVariant) -> int:
        return one.steps or self.options.steps

    def measure(self, name: str, one: HeadVariant, seed: int) -> dict[str, Any]:
        """Figures of one drafter and seed: of its training, and by temperature of its decoding in each mode."""
        run, steps = self.train(name, one, seed), self.steps(one)
        changes = {**one.changes, **({"train.frozen_backbone": "FOLDER"} if one.backbone else {})}
        trained_as = f"{one.trained_as or name}_w{self.options.width}_steps{steps}"
        cost = self.step_cost(trained_as, changes, steps)
        sizes = tensor_sizes(run)
        if one.backbone:
            whole = tensor_sizes(self.train(one.backbone, variants(self.options.width)[one.backbone], seed))
            trained = sum(size for tensor, size in sizes.items() if tensor not in whole)
        else:
            trained = sum(sizes.values())
        drafts = self.options.width - 1
        figures = {"trained_m": trained / 1e6, "stored_m": sum(sizes.values()) / 1e6, "steps": steps}
        figures |= training_figures(run) | {"tflops": steps * cost["flops"] / 1e12}
        for key, temperature in TEMPERATURES.items():
            figures[key] = self.decoded(f"{run.name}_{key}", run, one.modes, drafts, temperature, seed)
        if one.published and one.published != drafts:
            modes = (BASELINE, DRAFT)
            figures["published"] = self.decoded(f"{run.name}_published", run, modes, one.published, 0.0, seed)
        return figures

    def decoded(
        self, name: str, run: pathlib.Path, modes: Sequence[str], drafts: int, temperature: float, seed: int
    ) -> dict[str, Any]:
        """By mode {"emitted", "rounds": of each prompt, "accepted": by position, "same", "of", "violations"}."""
        values = {
            "decode.modes": "(" + "".join(f"'{mode}'," for mode in modes) + ")",
            "decode.num_drafts": drafts,
            "decode.tree.nodes": self.options.width,
            "decode.num_prompts": self.options.prompts,
            "decode.temperature": temperature,
            "decode.seed": seed,
        }
        report, lengths = self.decode(name, run, values), defaultdict(list)
        for line in (self.workdir / name / "generations.jsonl").read_text(encoding="utf-8").splitlines():
            answer = json.loads(line)
            lengths[answer["mode"]].append(answer["accept_lengths"])
        return {
            mode: {
                "emitted": [sum(each) for each in lengths[mode]],
                "rounds": [len(each) for each in lengths[mode]],
                "accepted": report["modes"][mode]["conditional_accept_rate_by_position"],
                **{key: report["identical_outputs"][mode][key] for key in ("same", "of", "violations")},
            }
            for mode in modes
            if mode != BASELINE
        }


# ------------------------------------------------------------------------------------- steps that make arms equal


def by_clock(study: Comparison, drafters: Mapping[str, HeadVariant]) -> dict[str, HeadVariant]:
    """The drafters with the steps that fit into equal time, by the seconds per step of short runs of each."""
    options, seconds = study.options, {}
    for name, one in drafters.items():
        pilot = f"{one.trained_as}_pilot" if one.trained_as else ""
        short = dataclasses.replace(one, steps=min(PILOT_STEPS, 2 * options.steps), trained_as=pilot)
        quiet = {"checkpoint.every": PILOT_STEPS, "train.log_every": 1 if options.small else 5, "eval.every": 0}
        run = study.train(f"{name}_pilot", short, options.seeds[0], **quiet)
        seconds[name] = step_seconds(read_rows(run / "metrics.jsonl"))
    budget = options.train_seconds or options.steps * seconds["domino"]
    return {name: dataclasses.replace(one, steps=max(1, int(budget / seconds[name]))) for name, one in drafters.items()}


def step_seconds(rows: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a step by the fastest logged interval: other work on the machine only adds to it.

    What comes before the first row, the compilation, is in none.
    """
    pairs = list(zip(rows, rows[1:], strict=False))
    return min((late["seconds"] - early["seconds"]) / (late["step"] - early["step"]) for early, late in pairs)


def by_predictions(study: Comparison, drafters: Mapping[str, HeadVariant]) -> dict[str, HeadVariant]:
    """The drafters with the steps that give them as many supervised predictions as Domino has in --steps.

    Predictions of a step are those of the trainings with equal steps, arm b's of the first seed.
    """
    options = study.options
    runs = {name: study.train(name, one, options.seeds[0]) for name, one in drafters.items()}
    each = {name: predictions_of_a_step(read_rows(run / "metrics.jsonl")) for name, run in runs.items()}
    equal = {}
    for name, one in drafters.items():
        share = each["domino"] / each[name]
        steps = options.steps if abs(share - 1) < ALIKE else max(1, round(share * options.steps))
        equal[name] = dataclasses.replace(one, steps=steps)
    return equal


# ---------------------------------------------------------------------------------------------------- figures


def in_passes(run: pathlib.Path, passes: int) -> pathlib.Path:
    """A folder beside a training's with the same drafter, which drafts in that many passes over a block."""
    folder = run.with_name(f"{run.name}_passes{passes}")
    shutil.copytree(run / "export", folder / "export", dirs_exist_ok=True)
    shutil.copy(run / "metrics.jsonl", folder)
    config = json.loads((folder / "export" / "config.json").read_text())
    (folder / "export" / "config.json").write_text(json.dumps(config | {"xpress_num_passes": passes}))
    return folder


def tensor_sizes(run: pathlib.Path) -> dict[str, int]:
    """Parameters of each stored tensor of a training's export."""
    tensors = hf.open_tensors(run / "export")
    return {name: math.prod(tensors.read(name).shape) for name in tensors}


def training_figures(run: pathlib.Path) -> dict[str, Any]:
    """Supervised predictions, the teacher-forced length on training rows, and τ at each evaluation."""
    rows = read_rows(run / "metrics.jsonl")
    trained = [row for row in rows if "predictions" in row]
    steps = trained[-1]["step"]
    late = [row["accept_len"] for row in trained if row["step"] > 0.9 * steps and "accept_len" in row]
    return {
        "predictions_m": steps * predictions_of_a_step(rows) / 1e6,
        "teacher_forced": statistics.fmean(late) if late else None,  # DFlash2 logs that of its own path instead
    }


def predictions_of_a_step(rows: Sequence[Mapping[str, float]]) -> float:
    return statistics.fmean(row["predictions"] for row in rows if "predictions" in row)


def row_of(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of the seeds; τ pooled over prompts with its 95 % interval, each prompt with the rounds of all seeds."""
    scalars = ("trained_m", "stored_m", "steps", "predictions_m", "tflops", "teacher_forced")
    row = {key: None if seeds[0][key] is None else statistics.fmean(seed[key] for seed in seeds) for key in scalars}
    for key, temperature in TEMPERATURES.items():
        for mode, words in ((DRAFT, "tau"), (TREE, "tree"), (BACKBONE, "backbone")):
            chosen = [seed[key][mode] for seed in seeds if mode in seed[key]]
            row |= tau_columns(f"{words}_{key}", f"{words}, T = {temperature:g}", chosen)
    row |= tau_columns("published", "published", [seed["published"][DRAFT] for seed in seeds if "published" in seed])
    rates = [seed["t0"][DRAFT]["accepted"] for seed in seeds]
    for place in range(min(map(len, rates))):
        values = [each[place] for each in rates if each[place] is not None]
        row[f"accepted_{place + 1}"] = statistics.fmean(values) if values else None
    return row


def tau_columns(key: str, words: str, seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{key, key_spread, key_low, key_high} and, under `words`, all of them as text."""
    taus = [sum(one["emitted"]) / sum(one["rounds"]) for one in seeds if sum(one["rounds"])]
    if not taus:
        return {}
    sums = [np.sum([one[part] for one in seeds], axis=0) for part in ("emitted", "rounds")]
    low, high = interval(pooled, *sums) or (None, None)
    text = with_spread(taus) + (f" [{low:.2f}, {high:.2f}]" if low is not None else "")
    row = {key: statistics.fmean(taus), f"{key}_spread": spread(taus), f"{key}_low": low, f"{key}_high": high}
    return row | {words: text}


def timing_columns(greedy: Mapping[str, Any], sampled: Mapping[str, Any]) -> dict[str, Any]:
    """Milliseconds of a round and its parts, break-even τ, tokens per second and speed-ups."""
    chain = greedy[DRAFT]
    row = {f"{part}_ms": chain["time_split"][part] for part in ("draft", "head", "verify", "commit", "round")}
    row |= {"break_even": chain["break_even_tau"], "tokens_s": chain["tokens_per_second"], "speedup": chain["speedup"]}
    if TREE in greedy:
        row |= {"tree_tokens_s": greedy[TREE]["tokens_per_second"], "tree_speedup": greedy[TREE]["speedup"]}
    return row | {"sampled_speedup": sampled[DRAFT]["speedup"]}


def equality(by_name: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """One sentence: how many drafted texts are the target's own."""
    kinds = [
        seed[kind]
        for seeds in by_name.values()
        for seed in seeds
        for kind in (*TEMPERATURES, "published")
        if kind in seed
    ]
    counts = [mode for kind in kinds for mode in kind.values()]
    same, of, violations = (sum(one[key] for one in counts) for key in ("same", "of", "violations"))
    return f"{same:,} of {of:,} drafted texts equal plain decoding's; {violations} differ by more than a near tie."


if __name__ == "__main__":
    run_main(main)
