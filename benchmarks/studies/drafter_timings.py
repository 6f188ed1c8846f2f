"""What rounds of trained drafters cost: all of them timed in one process, alternating, one request at a time.

    python -m benchmarks.studies.drafter_timings --runs=NAME=WORKDIR,… --prompts=FILE.jsonl --output=FILE.json

Tokens per second are of whole answers: plain decoding once, every drafter's chain at temperature 0 and 1 and its tree
at 0. The parts of a round and the plain step are medians from one place in an answer, the drafters again in turns
(domino_jax/evals/round_times.py).
Run it on a machine with nothing else to do; each start measures all of it.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.studies.drafter_decoding import TEMPERATURES, Plan, prompts_of, settings_of
from benchmarks.studies.study import TIMED_PROMPTS
from benchmarks.this_machine import conditions
from domino_jax.evals.compare import ComparedDrafter, drafter_lanes
from domino_jax.evals.lanes import Lane
from domino_jax.evals.prompts import Prompt, TextCodec
from domino_jax.evals.round_times import round_splits
from domino_jax.evals.run import run_lanes
from domino_jax.evals.run_files import RunFiles
from domino_jax.forecast.compiled import memory
from domino_jax.method.pair import Models
from domino_jax.method.settings import BASELINE, DRAFT, TREE, supported_modes
from domino_jax.runtime.cores import kept_to
from domino_jax.runtime.files import write_whole
from domino_jax.runtime.progress import Progress
from domino_jax.weights import loading

MODES = {"greedy": (BASELINE, DRAFT, TREE), "sampled": (BASELINE, DRAFT)}
REPEATS = 15  # of each timed part
POOL = 8  # prompts to choose from, for each one that is taken


def measure(runs: Mapping[str, pathlib.Path], plan: Plan) -> dict[str, Any]:
    """{"prompts": their number, "plain": tokens per second by temperature, "step_ms", "drafters": by name their
    figures, "conditions"}.

    A drafter's figures: tokens_per_second by temperature and mode, split (milliseconds of a round and its parts),
    break_even (round ÷ step, which is one step for all; None if that was too fast to time), peak_bytes (of the program
    of its chains, with the target's weights).
    """
    recipe = json.loads((next(iter(runs.values())) / "config.json").read_text())
    loaded = loading.load_target(recipe["target"]["path"], recipe["decode"]["dtype"])
    models = {name: loading.load_models(loaded, str(run)) for name, run in runs.items()}
    found: dict[str, Any] = {name: {"tokens_per_second": {}} for name in runs}
    plain = {}
    with kept_to(recipe["decode"]["cores"]):
        for kind, temperature in TEMPERATURES.items():
            lanes = lanes_of(models, loaded, recipe, dataclasses.replace(plan, modes=MODES[kind]), temperature)
            prompts = alike(lanes[0], prompts_of(loaded, plan), plan.count // POOL)
            rates = tokens_per_second(lanes, prompts, TextCodec(loaded.tokenizer, False))
            plain[kind] = rates.pop(BASELINE)
            for name, one in found.items():
                one["tokens_per_second"][kind] = {lane.mode: rates[lane.name] for lane in lanes if lane.drafter == name}
            if kind == "greedy":
                chains = {lane.drafter: lane for lane in lanes if lane.mode == DRAFT}
                step_ms, figures = round_figures(chains, prompts[0])
                for name, one in figures.items():
                    found[name] |= one
        # Here, so that it counts the cores that were used.
        return {
            "prompts": len(prompts),
            "plain": plain,
            "step_ms": step_ms,
            "drafters": found,
            "conditions": conditions(),
        }


def lanes_of(
    models: Mapping[str, Models],
    target: loading.LoadedTarget,
    recipe: Mapping[str, Any],
    plan: Plan,
    temperature: float,
) -> list[Lane]:
    """One of plain decoding, and those of the plan's modes that each drafter has."""
    drafters = {}
    for name, one in models.items():
        config = one.drafter.config
        chosen = dataclasses.replace(plan, modes=supported_modes(plan.modes, config.head))
        drafters[name] = ComparedDrafter(name, one, settings_of(recipe, config, chosen, 1, temperature))
    return drafter_lanes(drafters, target.stop_ids)


def alike(lane: Lane, prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of the commonest padded length, so that few programs are compiled."""
    buckets = [lane.generator.bucket(len(prompt.token_ids)) for prompt in prompts]
    commonest = Counter(buckets).most_common(1)[0][0]
    return [prompt for prompt, bucket in zip(prompts, buckets, strict=True) if bucket == commonest][: max(count, 1)]


def tokens_per_second(lanes: Sequence[Lane], prompts: Sequence[Prompt], codec: TextCodec) -> dict[str, float | None]:
    """By lane; from scratch, because an interrupted measurement is none."""
    with tempfile.TemporaryDirectory(prefix="domino-timings-") as folder:
        with RunFiles(pathlib.Path(folder) / "answers", {"timings": {}}) as files:
            measured = run_lanes(lanes, prompts, codec, 1, files)
    clocks = {name: run.clock for name, run in measured.runs.items()}
    return {
        name: clock.decode_tokens / clock.decode_seconds if clock.decode_seconds else None
        for name, clock in clocks.items()
    }


def round_figures(chains: Mapping[str, Lane], prompt: Prompt) -> tuple[float, dict[str, dict[str, Any]]]:
    """(milliseconds of a plain step, by drafter the parts of its round and the memory of its program), from one
    prompt."""
    with Progress("time the parts of rounds", total=1) as progress:
        started = {
            name: (lane.models, lane.generator, lane.generator.start(lane.models, [prompt.token_ids], [0]))
            for name, lane in chains.items()
        }
        splits = round_splits(started, [BASELINE, DRAFT], REPEATS)
        progress.advance(1)
    step, found = statistics.median(split[BASELINE]["round"] for split in splits.values()), {}
    for name, split in splits.items():
        programs = [program for key, program in chains[name].generator.compiled.items() if key[0] == DRAFT]
        found[name] = {
            "split": {part: seconds * 1e3 for part, seconds in split[DRAFT].items()},
            "break_even": split[DRAFT]["round"] / step if step else None,
            "peak_bytes": max(memory(program)["peak"] for program in programs),
        }
    return step * 1e3, found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", required=True, help="NAME=WORKDIR, joined by commas")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=TIMED_PROMPTS, help="prompts to answer")
    parser.add_argument("--drafts", type=int, default=15, help="of a chain")
    parser.add_argument("--nodes", type=int, default=16, help="of a tree, the root included")
    parser.add_argument("--seed", type=int, default=0, help="of the noise at temperature 1")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    choices = parser.parse_args(arguments)
    runs = {name: pathlib.Path(run) for name, run in (pair.split("=", 1) for pair in choices.runs.split(","))}
    plan = Plan(choices.prompts, POOL * choices.count, (), choices.drafts, 0, choices.nodes, choices.seed)
    write_whole(choices.output, json.dumps(measure(runs, plan), indent=1) + "\n")


if __name__ == "__main__":
    main()
