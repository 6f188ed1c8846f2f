"""Every draft head on the same data: all drafters of an arm, trained and decoded on the tiny target.

    python -m benchmarks.studies.heads --workdir=/tmp/heads --arm=b --seeds=0,1,2

Arms (head_variants.py): a, heads alone on frozen backbones; b, everything trained for equal steps; c, everything
trained for equal time; d, everything trained for equal supervised predictions. All see the same rows, the target's own
answers, in the same order, and block drafters of one seed the same anchors. Each trained drafter is decoded on held-out
prompts at temperature 0 and 1 with the same verify width, as a chain and as a tree, and at its published number of
drafts; plain decoding runs beside each. At the end all drafters of the first seed are timed in one process, which
--only_timings does again alone. Writes sections of docs/results.md and docs/results_positions.md, and two pictures.

Every training, decoding and count is a stage of a study (study.py): start the command again to continue it. --minutes=N
saves and stops after that time with exit code 42, --only=NAME runs one drafter. Arms in one workdir share their stages.
Any further --config.KEY=VALUE goes to every command.

Temperature 1 draws from the target's own distribution by noise that drafts and target share (docs/equality.md); the
training seed is the decoding seed.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.document import put_section
from benchmarks.studies.drafter_decoding import read_lines
from benchmarks.studies.drafter_probe import FIGURES, digest
from benchmarks.studies.head_variants import ARMS, BY_CLOCK, BY_PREDICTIONS, DRAFT, HeadVariant, variants
from benchmarks.studies.heads_tables import pictures, positions_section, section
from benchmarks.studies.study import (
    RECIPE,
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
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.figures import save
from domino_jax.training.metrics import read_rows

PAGE, POSITIONS = "results.md", "results_positions.md"
PILOT_STEPS = 40  # of the runs that measure seconds per step
CHECKPOINTS = 3  # of a training, the last one at its end: points of τ over FLOPs
ORACLE_PROMPTS = 8
ALIKE = 0.01  # a number of predictions per step that differs by less is the same


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parsed(arguments)
    arm, study = ARMS[options.arm], Study(options.workdir, overrides, options.minutes)
    comparison = Comparison(study, options)
    output, figures = pathlib.Path(options.output), study.workdir / f"figures_{options.arm}.json"
    if options.only_timings:
        write(output, with_new_timings(comparison, figures))
        return
    drafters = {name: one for name, one in variants(options.width).items() if name in arm.variants}
    rows = comparison.answers()
    if arm.equal == BY_CLOCK:
        drafters = by_clock(comparison, drafters)
    elif arm.equal == BY_PREDICTIONS:
        drafters = by_predictions(comparison, drafters)
    wanted = with_backbones(drafters, options.only or list(drafters))
    found = [{name: comparison.figures(name, drafters[name], seed) for name in wanted} for seed in options.seeds]
    if options.only:
        print("--only: no section is written", flush=True)
        return
    runs = {name: found[0][name]["run"] for name in drafters}
    recorded = {
        "arm": options.arm,
        "width": options.width,
        "steps": options.steps,
        "seeds": options.seeds,
        "prompts": options.prompts,
        "rows": rows,
        "oracle": comparison.oracle(drafters),
        "command": say_command("benchmarks.studies.heads", options, names_to_print(options), overrides),
        "conditions": conditions(("jax", "flax", "optax")),
        "runs": runs,
        "timings": comparison.timings(runs),
        "drafters": {
            name: {"title": one.title, "colour": one.colour, "seeds": [of_seed[name] for of_seed in found]}
            for name, one in drafters.items()
        },
    }
    figures.write_text(json.dumps(recorded, indent=1) + "\n")
    write(output, recorded)


def write(output: pathlib.Path, recorded: Mapping[str, Any]) -> None:
    """The sections of one arm in the two pages, and its pictures."""
    save(output, pictures(recorded))
    name, arm = recorded["arm"], ARMS[recorded["arm"]]
    text = section(recorded, arm)
    put_section(output / PAGE, f"heads {name}", text)
    put_section(output / POSITIONS, f"heads {name}", positions_section(recorded, arm))
    print(text)


def with_new_timings(comparison: "Comparison", figures: pathlib.Path) -> dict[str, Any]:
    """The recorded figures of an arm with its drafters timed again."""
    if not figures.exists():
        raise DominoError(f"there is no {figures} yet: run the arm without --only_timings first.")
    recorded = json.loads(figures.read_text())
    comparison.study.forget(comparison.timings_name)
    recorded["timings"] = comparison.timings(recorded["runs"])
    figures.write_text(json.dumps(recorded, indent=1) + "\n")
    return recorded


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__, steps=250)
    parser.add_argument("--arm", choices=list(ARMS), default="b")
    parser.add_argument(
        "--width", type=at_least(2), default=16, help="rows of the verifying pass; blocks have as many slots"
    )
    parser.add_argument("--prompts", type=at_least(1), default=32, help="held-out prompts to decode")
    parser.add_argument("--train_seconds", type=time_of, default=0.0, help="arm c; 0: what Domino needs for --steps")
    parser.add_argument("--only_timings", action="store_true", help="time the drafters of a finished arm again")
    return parse(parser, arguments, lambda options: ARMS[options.arm].variants)


def names_to_print(options: argparse.Namespace) -> list[str]:
    timed = ["train_seconds"] if options.train_seconds else []
    return ["arm", "width", "steps", *timed, "prompts", "seeds"]


def with_backbones(drafters: Mapping[str, HeadVariant], names: Sequence[str]) -> list[str]:
    """The names, each after the backbone that it needs."""
    return list(dict.fromkeys(part for name in names for part in (drafters[name].backbone, name) if part))


class Comparison:
    """The stages of all drafters, and the figures of each."""

    def __init__(self, study: Study, options: argparse.Namespace):
        self.study, self.options = study, options
        self.timings_name = f"timings_{options.arm}"

    # ------------------------------------------------------------------------------------------------ stages

    def answers(self) -> dict[str, Any]:
        """{"training", "held_out": digest and number of the rows}; both are the target's own answers.

        Raises:
            DataError: a held-out prompt is also a training prompt.
        """
        trained, file = read_lines(self.study.answers()), self.study.held_out
        flags = {
            "config": RECIPE,
            **self.study.overrides,
            "prompts": file,
            "config.regenerate.num_prompts": self.options.prompts,
        }
        stage = Stage("held_out", "domino_jax.regenerate", flags, ("output", "held_out.jsonl"))
        held_out = read_lines(self.study.run(stage))
        both = {prompt_of(row) for row in trained} & {prompt_of(row) for row in held_out}
        if both:
            raise DataError(
                f"{len(both)} prompts of {file} are training prompts as well, so τ would be of learnt answers."
                "\nName other prompts with --config.eval.prompts=FILE.jsonl."
            )
        rows = {"training": trained, "held_out": held_out}
        return {name: {"count": len(each), "sha256": digest(each)} for name, each in rows.items()}

    def train(self, name: str, one: HeadVariant, seed: int, **changes: Any) -> pathlib.Path:
        steps = self.steps(one)
        values = {
            **one.changes,
            "train.log_every": max(1, steps // 50),
            "checkpoint.every": -(-steps // CHECKPOINTS),
            "checkpoint.keep": 10,  # an interrupted run has more of them
            "eval.every": 0,  # decoded at the end, so that no held-out prompt chooses a checkpoint
            **changes,
        }
        if one.backbone:
            values["train.frozen_backbone"] = self.backbone(one, seed)
        return self.study.train(f"{name}_w{self.options.width}", values, seed, steps)

    def steps(self, one: HeadVariant) -> int:
        return one.steps or self.options.steps

    def backbone(self, one: HeadVariant, seed: int) -> pathlib.Path:
        return self.train(one.backbone, variants(self.options.width)[one.backbone], seed)

    def probe(self, run: pathlib.Path, one: HeadVariant, seed: int) -> dict[str, Any]:
        """What benchmarks/studies/drafter_probe.py finds of a training."""
        drafts = self.options.width - 1
        flags = {
            "run": run,
            "answers": self.study.workdir / "held_out.jsonl",
            "prompts": self.study.held_out,
            "count": self.options.prompts,
            "modes": ",".join(one.modes),
            "drafts": drafts,
            "published": 0 if one.published == drafts else one.published,
            "nodes": self.options.width,
            "seed": seed,
        }
        name = f"{run.name}_probe"
        folder = self.study.run(Stage(name, "benchmarks.studies.drafter_probe", flags, ("output", name)))
        return json.loads((folder / FIGURES).read_text())

    def figures(self, name: str, one: HeadVariant, seed: int) -> dict[str, Any]:
        """All that the section shows of one drafter and seed, JSON values; run: the folder of its training."""
        run, steps = self.train(name, one, seed), self.steps(one)
        changes = {**one.changes, **({"train.frozen_backbone": "FOLDER"} if one.backbone else {})}
        cost = self.study.step_cost(f"{name}_w{self.options.width}_steps{steps}", changes, steps)
        probe = self.probe(run, one, seed)
        trained = probe["head"] if one.backbone else probe["stored"]
        return {
            "run": run.name,
            **training_figures(run, cost),
            "curve": curve_of(probe, cost["flops"], steps),
            "trained": trained,
            "stored": probe["stored"],
            "draft_bytes": probe["draft_bytes"],
            "blocks": probe["blocks"],
            "published": one.published,
            **probe["decoded"],
        }

    def oracle(self, drafters: Mapping[str, HeadVariant]) -> float:
        """τ of the first drafter when every draft is accepted: the cap, less what the ends of texts cut off."""
        name, one = next(iter(drafters.items()))
        run, width = self.train(name, one, self.options.seeds[0]), self.options.width
        values = {
            "decode.num_drafts": width - 1,
            "decode.simulate_tau": width,
            "decode.modes": f"('{DRAFT}',)",
            "decode.num_prompts": min(ORACLE_PROMPTS, self.options.prompts),
        }
        return self.study.decode(f"{run.name}_oracle", run, values)["modes"][DRAFT]["tau_pooled"]

    def timings(self, runs: Mapping[str, str]) -> dict[str, Any]:
        """What benchmarks/studies/drafter_timings.py measures of drafters, folder by name."""
        folders = {name: self.study.workdir / run for name, run in runs.items()}
        width = self.options.width
        return self.study.timings(self.timings_name, folders, width - 1, width, self.options.seeds[0])


# ------------------------------------------------------------------------------------- steps that make arms equal


def by_clock(comparison: Comparison, drafters: Mapping[str, HeadVariant]) -> dict[str, HeadVariant]:
    """The drafters with the steps that fit into equal time, by the seconds per step of short runs of each."""
    options, seconds = comparison.options, {}
    for name, one in drafters.items():
        short = dataclasses.replace(one, steps=PILOT_STEPS)
        quiet = {"checkpoint.every": PILOT_STEPS, "train.log_every": 5}
        folder = comparison.train(f"{name}_pilot", short, options.seeds[0], **quiet)
        seconds[name] = step_seconds(read_rows(folder / "metrics.jsonl"))
    budget = options.train_seconds or options.steps * seconds["domino"]
    return {name: dataclasses.replace(one, steps=max(1, int(budget / seconds[name]))) for name, one in drafters.items()}


def step_seconds(rows: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a step by the fastest logged interval: other work on the machine only adds to it.

    What comes before the first row, the compilation, is in none.
    """
    pairs = list(zip(rows, rows[1:], strict=False))
    return min((late["seconds"] - early["seconds"]) / (late["step"] - early["step"]) for early, late in pairs)


def by_predictions(comparison: Comparison, drafters: Mapping[str, HeadVariant]) -> dict[str, HeadVariant]:
    """The drafters with the steps that give them as many supervised predictions as Domino has in --steps.

    Predictions of a step are those of the trainings with equal steps, arm b's of the first seed.
    """
    options, each = comparison.options, {}
    for name, one in drafters.items():
        run = comparison.train(name, one, options.seeds[0])
        each[name] = predictions_of_a_step(read_rows(run / "metrics.jsonl"))
    found = {}
    for name, one in drafters.items():
        share = each["domino"] / each[name]
        steps = options.steps if abs(share - 1) < ALIKE else max(1, round(share * options.steps))
        found[name] = dataclasses.replace(one, steps=steps)
    return found


# ---------------------------------------------------------------------------------------------------- figures


def training_figures(run: pathlib.Path, cost: Mapping[str, float]) -> dict[str, Any]:
    """Of metrics.jsonl and dry_run.json: steps, FLOPs, memory, supervised predictions, teacher-forced length."""
    rows = read_rows(run / "metrics.jsonl")
    trained = [row for row in rows if "predictions" in row]
    steps = trained[-1]["step"]
    late = [row["accept_len"] for row in trained if row["step"] > 0.9 * steps and "accept_len" in row]
    return {
        "steps": steps,
        "flops": steps * cost["flops"],
        "train_bytes": cost["peak_bytes_per_chip"],
        "predictions": steps * predictions_of_a_step(rows),
        "teacher_forced": statistics.fmean(late) if late else None,  # DFlash2 logs that of its own path instead
    }


def predictions_of_a_step(rows: Sequence[Mapping[str, float]]) -> float:
    return statistics.fmean(row["predictions"] for row in rows if "predictions" in row)


def curve_of(probe: Mapping[str, Any], flops: float, steps: int) -> list[list[float]]:
    """[FLOPs so far, τ at temperature 0] of the checkpoints and of the end, all over the checkpoints' prompts."""
    every, chain = -(-steps // CHECKPOINTS), probe["decoded"]["greedy"]["modes"][DRAFT]
    count = probe["curve_prompts"]
    ends = [[steps, sum(chain["emitted"][:count]), sum(chain["rounds"][:count])]]
    points = [point for point in probe["curve"] if point[0] % every == 0] + ends
    return [[step * flops, emitted / rounds] for step, emitted, rounds in points if rounds]


def prompt_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    mask = row["loss_mask"]
    return tuple(row["token_ids"][: mask.index(1)] if 1 in mask else row["token_ids"])


if __name__ == "__main__":
    run_main(main)
