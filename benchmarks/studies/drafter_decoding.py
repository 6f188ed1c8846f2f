"""Acceptance of one trained drafter: held-out prompts decoded at temperature 0 and 1 in all of its modes.

Both temperatures share the programs, since each request brings its own sampling. ROWS requests run together; texts and
acceptance do not depend on that. Nothing is timed here (drafter_timings.py is).
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import config_dict

from domino_jax.decoding.acceptance import accept_rates, full_histogram
from domino_jax.decoding.decode_settings import DecodeSettings, decode_settings
from domino_jax.decoding.generate import Generator, new_generator
from domino_jax.decoding.requests import Request
from domino_jax.evals.lanes import Lane
from domino_jax.evals.prompts import Prompt, TextCodec, prepare_prompts
from domino_jax.evals.run import run_lanes
from domino_jax.evals.run_files import GENERATIONS, PROGRESS, RunFiles
from domino_jax.export import restore_params
from domino_jax.method.drafter import rows_together
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.pair import Models
from domino_jax.method.settings import BASELINE, DRAFT, SamplingParams
from domino_jax.recipe.decoding import fit_to_drafter, read_file_rows
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.weights.drafter import EXPORT_DTYPE
from domino_jax.weights.loading import LoadedTarget

TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}
PUBLISHED = "published"  # the chain of the published drafter's length
ROWS = 3  # together; smaller batches, and programs for them, come with four rows and more
CURVE_PROMPTS = 12  # that the checkpoints of a run are decoded with


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a drafter is decoded.

    prompts: a file, of which the first `count` count.  modes: plain decoding first.  drafts: of a chain.
    published: drafts of the published drafter's chains; 0: the same.  nodes: of a tree, the root included.
    seed: of the noise at temperature 1.
    """

    prompts: str
    count: int
    modes: tuple[str, ...]
    drafts: int
    published: int
    nodes: int
    seed: int


def decoded(
    models: Models, target: LoadedTarget, recipe: Mapping[str, Any], plan: Plan, output: pathlib.Path
) -> dict[str, Any]:
    """By temperature {"modes": figures by mode (`lane_figures`), "plain": digest of the texts of plain decoding}.

    An interrupted decoding continues in `output`.
    """
    lanes = lanes_of(models, target, recipe, plan)
    asked = both_temperatures(prompts_of(target, plan), plan.seed)
    codec = TextCodec(target.tokenizer, False)
    with RunFiles(output, {"plan": {**dataclasses.asdict(plan), "modes": list(plan.modes)}}) as files:
        run_lanes(lanes, asked, codec, ROWS, files)
    answers, records = read_lines(output / GENERATIONS), read_lines(output / PROGRESS)
    widths = {lane.name: (plan.published if lane.name == PUBLISHED else plan.drafts) + 1 for lane in lanes}
    found = {}
    for kind, temperature in TEMPERATURES.items():
        places = [place for place, prompt in enumerate(asked) if prompt.request.sampling.temperature == temperature]
        ids = {asked[place].id for place in places}
        of_kind = [line for line in answers if line["id"] in ids]
        modes = {}
        for lane in lanes:
            lines = [line for line in of_kind if is_of(line, lane)]
            modes[lane.name] = lane_figures(lines, divergences_of(records, lane.name, places), widths[lane.name])
        plain = [line for line in of_kind if line["mode"] == BASELINE]
        found[kind] = {"modes": modes, "plain": plain_digest(plain)}
    return found


def lanes_of(models: Models, target: LoadedTarget, recipe: Mapping[str, Any], plan: Plan) -> list[Lane]:
    settings = settings_of(recipe, models.drafter.config, plan, ROWS)
    generator = whole_caches(models, settings, target)
    lanes = [Lane(mode, mode, models, generator) for mode in plan.modes]
    if plan.published:
        other = settings_of(recipe, models.drafter.config, dataclasses.replace(plan, drafts=plan.published), ROWS)
        lanes.append(Lane(PUBLISHED, DRAFT, models, whole_caches(models, other, target), PUBLISHED))
    return lanes


def settings_of(
    recipe: Mapping[str, Any], drafter: AnyConfig, plan: Plan, rows: int, temperature: float = 0.0
) -> DecodeSettings:
    """The recipe's decode section with the modes, drafts, nodes and seed of the plan."""
    section = recipe["decode"]
    given = {"modes": plan.modes, "num_drafts": plan.drafts, "batch_size": rows, "seed": plan.seed}
    tree = {**section["tree"], "nodes": plan.nodes}
    whole = config_dict.ConfigDict({**section, **given, "temperature": temperature, "tree": tree})
    settings, notes = fit_to_drafter(decode_settings(whole, drafter.head), drafter, ())
    print(*notes, sep="\n", end="\n" * bool(notes))
    return settings


def whole_caches(models: Models, settings: DecodeSettings, target: LoadedTarget) -> Generator:
    """A generator whose caches have one size, so that each mode is one program."""
    wanted = settings.generator(target.stop_ids)
    return new_generator(models, dataclasses.replace(wanted, smallest_cache=wanted.cache_slots))


def prompts_of(target: LoadedTarget, plan: Plan) -> list[Prompt]:
    return prepare_prompts(read_file_rows(plan.prompts, plan.count), TextCodec(target.tokenizer, False))


def both_temperatures(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Each prompt once for each temperature, side by side: batches that hold both need one program."""
    return [
        dataclasses.replace(
            prompt,
            id=f"{prompt.id}, {kind}",
            task=None,
            request=Request(place, seed=seed, sampling=SamplingParams(temperature=temperature)),
        )
        for place, prompt in enumerate(prompts)
        for kind, temperature in TEMPERATURES.items()
    ]


def curve(
    models: Models, target: LoadedTarget, recipe: Mapping[str, Any], plan: Plan, run: pathlib.Path, output: pathlib.Path
) -> list[list[float]]:
    """[step, emitted, rounds] of chains at temperature 0, for the checkpoints of a run but the last."""
    config = models.drafter.config
    few = dataclasses.replace(plan, count=min(plan.count, CURVE_PROMPTS), modes=(DRAFT,), published=0)
    asked = both_temperatures(prompts_of(target, few), plan.seed)
    [lane] = lanes_of(models, target, recipe, few)
    points = []
    with Checkpoints(run, keep=1) as checkpoints:
        for step in checkpoints.steps()[:-1]:
            params = restore_params(checkpoints, config, step)
            stored = jax.tree.map(lambda leaf: np.asarray(leaf).astype(EXPORT_DTYPE), params)
            placed = jax.tree.map(lambda leaf: jax.numpy.asarray(leaf, models.target.dtype), stored)
            then = dataclasses.replace(lane, models=models.replace(drafter_params=rows_together(placed)))
            with RunFiles(output / str(step), {"plan": {"step": step, "count": few.count}}) as files:
                run_lanes([then], asked, TextCodec(target.tokenizer, False), ROWS, files)
            greedy = [line for line in read_lines(output / str(step) / GENERATIONS) if line["id"].endswith("greedy")]
            lengths = [line["accept_lengths"] for line in greedy]
            points.append([step, sum(map(sum, lengths)), sum(map(len, lengths))])
    return points


# ---------------------------------------------------------------------------------------------------- figures


def lane_figures(lines: Sequence[Mapping[str, Any]], diverged: Sequence[Mapping] | None, width: int) -> dict[str, Any]:
    """Figures of one mode's answers at one temperature.

    Args:
        lines: of generations.jsonl, in the order of the prompts.
        diverged: where answers differ from those of plain decoding; None for plain decoding itself.
        width: tokens that a round can emit.

    Returns:
        emitted, rounds: of each answer.  histogram: rounds by the tokens they emitted.  conditional: the share of
        rounds that accepted draft k among those that accepted draft k-1.  identical: with plain decoding, or None.
    """
    lengths = [line["accept_lengths"] for line in lines]
    counts = collections.Counter(emitted for each in lengths for emitted in each)
    histogram = full_histogram(counts, width)
    return {
        "emitted": [sum(each) for each in lengths],
        "rounds": [len(each) for each in lengths],
        "histogram": histogram,
        "conditional": accept_rates(histogram)[1],
        "identical": None
        if diverged is None
        else {
            "same": len(lines) - len(diverged),
            "of": len(lines),
            "violations": sum(not one["near_tie"] for one in diverged),
        },
    }


def divergences_of(records: Sequence[Mapping], lane: str, places: Sequence[int]) -> list[Mapping] | None:
    """Those of a lane at these places among the prompts; None for the lane that the others are compared with."""
    found = [record["lanes"][lane]["divergences"] for record in records if "group" in record]
    if any(each is None for each in found):
        return None
    return [one for each in found for one in each if one["prompt"] in places]


def is_of(line: Mapping[str, Any], lane: Lane) -> bool:
    return (line["mode"], line["drafter"] if "drafter" in line else None) == (lane.mode, lane.drafter)


def plain_digest(lines: Sequence[Mapping[str, Any]]) -> str:
    return hashlib.sha256(json.dumps([line["token_ids"] for line in lines]).encode()).hexdigest()


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
