"""Every draft head on the same data: all drafters of an arm, trained and decoded on the tiny target.

    python -m benchmarks.heads --workdir=/tmp/heads --arm=b --seeds=0,1,2 --steps=300

Arms (head_variants.py): a, heads alone on one frozen backbone; b, everything trained for equal steps; c, everything
trained for equal time. All see the same rows, the target's own answers, in the same order, and block drafters of one
seed the same anchors. Each trained drafter is decoded on held-out prompts at temperature 0 and 1 with the same verify
width, as a chain and as a tree, and at its published number of drafts; plain decoding runs beside each. Writes a
section of docs/results.md and two pictures.

Every training, decoding and count is a stage of a study (study.py): start the command again to continue it. --minutes=N
saves and stops after that time with exit code 42, --only=NAME runs one drafter. Any further --config.KEY=VALUE goes to
every command.

Temperature 1 draws from the target's own distribution by noise that drafts and target share (docs/equality.md); the
training seed is the decoding seed.
"""

import argparse
import dataclasses
import hashlib
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.drafter_probe import digest, read_answers
from benchmarks.head_variants import ARMS, DRAFT, PLAIN, HeadVariant, variants
from benchmarks.heads_tables import pictures, section
from benchmarks.study import RECIPE, Stage, Study, parse, parser_of, put_section, run_main, say_command
from benchmarks.this_machine import conditions
from domino_jax.recipe.checks import load_recipe
from domino_jax.runtime.errors import DataError
from domino_jax.runtime.figures import save
from domino_jax.training.metrics import read_rows

PILOT_STEPS = 40  # of the runs that measure seconds per step
FIGURES = "figures"


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = parsed(arguments)
    arm, study = ARMS[options.arm], Study(options.workdir, overrides, options.minutes)
    drafters = {name: one for name, one in variants(options.width).items() if name in arm.variants}
    comparison = Comparison(study, options)
    rows = comparison.answers()
    wanted = with_backbones(drafters, options.only or list(drafters))
    if arm.by_clock:
        drafters = by_clock(comparison, drafters, options)
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    for seed in options.seeds:
        for name in wanted:
            figures[name].append(comparison.figures(name, drafters[name], seed))
    if options.only:
        print("--only: no section is written", flush=True)
        return
    recorded = {
        "arm": options.arm,
        "width": options.width,
        "steps": options.steps,
        "seeds": options.seeds,
        "rows": rows,
        "oracle": comparison.oracle(drafters, options.seeds[0]),
        "command": say_command("benchmarks.heads", options, ["arm", "width", "steps", "seeds"], overrides),
        "conditions": conditions(("jax", "flax", "optax")),
        "drafters": {
            name: {"title": one.title, "colour": one.colour, "backbone": one.backbone, "seeds": figures[name]}
            for name, one in drafters.items()
        },
    }
    (study.workdir / f"{FIGURES}_{options.arm}.json").write_text(json.dumps(recorded, indent=1) + "\n")
    write(pathlib.Path(options.output), recorded)


def write(output: pathlib.Path, recorded: Mapping[str, Any]) -> None:
    """The section of one arm in results.md, and its pictures."""
    save(output, pictures(recorded))
    text = section(recorded, ARMS[recorded["arm"]])
    put_section(output / "results.md", f"heads {recorded['arm']}", text)
    print(text)


def parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of(__doc__, steps=300)
    parser.add_argument("--arm", choices=list(ARMS), default="b")
    parser.add_argument("--width", type=int, default=16, help="rows of the verifying pass; blocks have as many slots")
    parser.add_argument("--train_seconds", type=float, default=0.0, help="arm c; 0: what Domino needs for --steps")
    return parse(parser, arguments, lambda options: ARMS[options.arm].variants)


def with_backbones(drafters: Mapping[str, HeadVariant], names: Sequence[str]) -> list[str]:
    """The names, each after the backbone that it needs."""
    return list(dict.fromkeys(part for name in names for part in (drafters[name].backbone, name) if part))


class Comparison:
    """The stages of all drafters, and the figures of each."""

    def __init__(self, study: Study, options: argparse.Namespace):
        self.study, self.options = study, options
        given = study.overrides
        prompts = load_recipe(str(RECIPE)).eval.prompts
        self.held_out = given["config.eval.prompts"] if "config.eval.prompts" in given else prompts

    def answers(self) -> dict[str, Any]:
        """{"training", "held_out": digest and number of the rows}; both are the target's own answers.

        Raises:
            DataError: a held-out prompt is also a training prompt.
        """
        trained = read_answers(self.study.answers())
        flags = {
            "config": RECIPE,
            **self.study.overrides,
            "prompts": self.held_out,
            "config.regenerate.num_prompts": 64,
        }
        stage = Stage("held_out", "domino_jax.regenerate", flags, ("output", "held_out.jsonl"))
        held_out = read_answers(self.study.run(stage))
        both = {prompt_of(row) for row in trained} & {prompt_of(row) for row in held_out}
        if both:
            raise DataError(
                f"{len(both)} prompts of {self.held_out} are training prompts as well, so τ would be of learnt answers."
                "\nName other prompts with --config.eval.prompts=FILE.jsonl."
            )
        rows = {"training": trained, "held_out": held_out}
        return {name: {"count": len(each), "sha256": digest(each)} for name, each in rows.items()}

    def train(self, name: str, one: HeadVariant, seed: int) -> pathlib.Path:
        changes, steps = dict(one.changes), one.steps or self.options.steps
        if one.backbone:
            changes["train.frozen_backbone"] = self.backbone(one, seed)
        return self.study.train(f"{name}_w{self.options.width}", changes, seed, steps)

    def backbone(self, one: HeadVariant, seed: int) -> pathlib.Path:
        return self.train(one.backbone, variants(self.options.width)[one.backbone], seed)

    def figures(self, name: str, one: HeadVariant, seed: int) -> dict[str, Any]:
        """All that the section shows of one drafter and seed, JSON values."""
        run = self.train(name, one, seed)
        changes = {**one.changes, **({"train.frozen_backbone": "FOLDER"} if one.backbone else {})}
        flops = self.study.step_cost(f"{name}_w{self.options.width}", changes)["flops"]
        width = self.options.width
        drafts = {"decode.num_drafts": width - 1}
        modes = {"decode.modes": tuple_flag(one.modes)}
        decoded = {
            "greedy": self.decoded(f"{run.name}_T0", run, {**drafts, **modes, "decode.temperature": 0.0}),
            "sampled": self.decoded(
                f"{run.name}_T1", run, {**drafts, **modes, "decode.temperature": 1.0, "decode.seed": seed}
            ),
        }
        if one.published and one.published != width - 1:
            values = {"decode.num_drafts": one.published, "decode.modes": tuple_flag([DRAFT])}
            decoded["published"] = self.decoded(f"{run.name}_published", run, values) | {"drafts": one.published}
        probe = self.probe(run)
        return {**training_figures(run, flops), **parameters(probe, one), "blocks": probe["blocks"], **decoded}

    def decoded(self, name: str, run: pathlib.Path, values: Mapping[str, Any]) -> dict[str, Any]:
        """By mode what the tables need of a decoding; "plain": digest of the texts of plain decoding."""
        report = self.study.decode(name, run, values)
        lines = read_answers(self.study.workdir / name / "generations.jsonl")
        found = {mode: mode_figures(report, mode, lines) for mode in report["modes"]}
        return {"modes": found, "plain": plain_digest(lines)}

    def probe(self, run: pathlib.Path) -> dict[str, Any]:
        name = f"{run.name}_probe"
        flags = {"run": run, "answers": self.study.workdir / "held_out.jsonl"}
        stage = Stage(name, "benchmarks.drafter_probe", flags, ("output", f"{name}.figures.json"))
        return json.loads(self.study.run(stage).read_text())

    def oracle(self, drafters: Mapping[str, HeadVariant], seed: int) -> float:
        """τ of the first drafter when every draft is accepted: the cap, less what the ends of texts cut off."""
        name, one = next(iter(drafters.items()))
        run, width = self.train(name, one, seed), self.options.width
        values = {"decode.num_drafts": width - 1, "decode.simulate_tau": width, "decode.modes": tuple_flag([DRAFT])}
        return self.study.decode(f"{run.name}_oracle", run, values)["modes"][DRAFT]["tau_pooled"]


def by_clock(
    comparison: Comparison, drafters: Mapping[str, HeadVariant], options: argparse.Namespace
) -> dict[str, HeadVariant]:
    """The drafters with the steps that fit into equal time, by the seconds per step of short runs of each."""
    study, seconds = comparison.study, {}
    for name, one in drafters.items():
        quiet = {**one.changes, "eval.every": 0, "checkpoint.every": PILOT_STEPS, "train.log_every": 5}
        folder = study.train(f"{name}_w{options.width}_pilot", quiet, options.seeds[0], PILOT_STEPS)
        seconds[name] = step_seconds(read_rows(folder / "metrics.jsonl"))
    budget = options.train_seconds or options.steps * seconds["domino"]
    return {name: dataclasses.replace(one, steps=max(1, int(budget / seconds[name]))) for name, one in drafters.items()}


def step_seconds(rows: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a step, the median over the logged intervals after the first, which holds the compilation."""
    pairs = list(zip(rows[1:-1], rows[2:], strict=True))
    return statistics.median(
        (late["seconds"] - early["seconds"]) / (late["step"] - early["step"]) for early, late in pairs
    )


# ---------------------------------------------------------------------------------------------------- figures


def training_figures(run: pathlib.Path, flops: float) -> dict[str, Any]:
    """Of metrics.jsonl: steps, FLOPs, supervised predictions, teacher-forced length, and τ over the FLOPs."""
    rows = read_rows(run / "metrics.jsonl")
    trained = [row for row in rows if "predictions" in row]
    steps = trained[-1]["step"]
    late = [row["accept_len"] for row in trained if row["step"] > 0.9 * steps and "accept_len" in row]
    return {
        "steps": steps,
        "flops": steps * flops,
        "predictions": steps * statistics.fmean(row["predictions"] for row in trained),
        "teacher_forced": statistics.fmean(late) if late else None,  # DFlash2 logs that of its own path instead
        "curve": [[row["step"] * flops, row["eval_tau"]] for row in rows if row.get("eval_tau") is not None],
    }


def parameters(probe: Mapping[str, Any], one: HeadVariant) -> dict[str, Any]:
    trained = probe["head"] if one.backbone else probe["stored"]
    return {"trained": trained, "stored": probe["stored"], "draft_bytes": probe["draft_bytes"]}


def mode_figures(report: Mapping[str, Any], mode: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """emitted, rounds: of each answer in order.  The rest: of report.json."""
    figures = report["modes"][mode]
    accepted = [line["accept_lengths"] for line in lines if line["mode"] == mode]
    same = report["identical_outputs"][mode] if mode in report["identical_outputs"] else None
    return {
        "emitted": [sum(each) for each in accepted],
        "rounds": [len(each) for each in accepted],
        "tokens_per_second": figures["tokens_per_second"],
        "speedup": figures["speedup"],
        "conditional": figures["conditional_accept_rate_by_position"],
        "time_split": figures["time_split"],
        "break_even_tau": figures["break_even_tau"],
        "identical": same and {key: same[key] for key in ("same", "of", "violations")},
    }


def plain_digest(lines: Sequence[Mapping[str, Any]]) -> str | None:
    plain = [line["token_ids"] for line in lines if line["mode"] == PLAIN]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest() if plain else None


def prompt_of(row: Mapping[str, Any]) -> tuple[int, ...]:
    mask = row["loss_mask"]
    return tuple(row["token_ids"][: mask.index(1)] if 1 in mask else row["token_ids"])


def tuple_flag(names: Sequence[str]) -> str:
    return "(" + "".join(f"'{name}'," for name in names) + ")"


if __name__ == "__main__":
    run_main(main)
