"""Prompts through lanes (modes, drafters), group by group, into files and sums.

A group is what runs together before the next lane runs: one prompt at batch size 1, else four batches, so that rows
which end early are replaced for most of it. Only sums, a few numbers per answer and the prompts are held, so memory
does not grow with what is generated.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import Clock, Generation
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.settings import BASELINE
from domino_jax.evals.lanes import Lane, ModeRun, add_clock, baseline_of
from domino_jax.evals.near_ties import Divergence, divergences
from domino_jax.evals.round_times import round_split
from domino_jax.evals.run_files import RunFiles, generation_row, read_generation
from domino_jax.runtime.progress import Progress

BATCHES_IN_A_GROUP = 4


@dataclasses.dataclass(frozen=True)
class Group:
    """Prompts of one task that run together. first: the place of the first one among all prompts."""

    number: int
    first: int
    prompts: Sequence[Prompt]

    @property
    def task(self) -> str | None:
        return self.prompts[0].task

    @property
    def turns(self) -> int:
        return sum(prompt.turns_left for prompt in self.prompts)


@dataclasses.dataclass
class Measured:
    """Sums by lane name: of all prompts, and of each task where prompts have one; figures by batch size."""

    runs: dict[str, ModeRun]
    tasks: dict[str, dict[str, ModeRun]] = dataclasses.field(default_factory=dict)
    concurrency: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, lanes: Sequence[Lane], record: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Counts a finished group: its record in progress.jsonl and its rows of generations.jsonl."""
        names = {(lane.drafter, lane.mode): lane.name for lane in lanes}
        answers: dict[str, list[Generation]] = {lane.name: [] for lane in lanes}
        for line in lines:
            answers[names[line.get("drafter"), line["mode"]]].append(read_generation(line))
        sums = [self.runs]
        if record["task"] is not None:
            sums.append(self.tasks.setdefault(record["task"], {name: ModeRun() for name in self.runs}))
        for runs in sums:
            for name, run in runs.items():
                figures = record["lanes"][name]
                run.add(answers[name])
                run.add_group(Clock(**figures["clock"]))
                if figures["divergences"] is not None:
                    run.add_comparison(len(answers[name]), figures["divergences"])


def plan_groups(prompts: Sequence[Prompt], batch_size: int) -> list[Group]:
    """Groups in the order of the prompts; none holds prompts of two tasks."""
    size = BATCHES_IN_A_GROUP * batch_size if batch_size > 1 else 1
    groups, start = [], 0
    for end in range(1, len(prompts) + 1):
        if end == len(prompts) or prompts[end].task != prompts[start].task or end - start == size:
            groups.append(Group(len(groups), start, prompts[start:end]))
            start = end
    return groups


def run_lanes(
    lanes: Sequence[Lane],
    prompts: Sequence[Prompt],
    codec: TextCodec,
    batch_size: int,
    files: RunFiles | None,
    simulated: bool = False,
) -> Measured:
    """All prompts through all lanes; groups that `files` holds from earlier starts are counted and not run again.

    simulated: outputs are forced and not the target's, so none is compared.
    """
    measured = Measured({lane.name: ModeRun() for lane in lanes})
    groups, done = plan_groups(prompts, batch_size), 0
    for record, lines in files.replay() if files else ():
        if "group" in record:
            measured.add(lanes, record, lines)
            done += 1
    total, before = (sum(group.turns for group in some) * len(lanes) for some in (groups, groups[:done]))
    with Progress(f"decode, {batch_size} at a time", total=total, done=before) as progress:
        for group in groups[done:]:
            record, lines = decode_group(lanes, group, codec, simulated)
            if files:
                files.append(record, lines)
            measured.add(lanes, record, lines)
            progress.advance(group.turns * len(lanes), group.task or "")
    return measured


def decode_group(
    lanes: Sequence[Lane], group: Group, codec: TextCodec, simulated: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One group through all lanes, turn by turn: its record and its rows of generations.jsonl.

    The history of a later turn holds the baseline's answer, or the first lane's. The group's number determines the
    first lane: with a rotating start a noisy machine disturbs all lanes alike.
    """
    baseline, first = baseline_of(lanes), group.number % len(lanes)
    compared = [lane for lane in lanes if baseline and lane is not baseline and not simulated]
    figures = {lane.name: {"clock": Clock(), "divergences": None} for lane in lanes}
    figures |= {lane.name: {**figures[lane.name], "divergences": []} for lane in compared}
    lines, turns = [], list(enumerate(group.prompts, group.first))
    while turns:
        prompts = [prompt for _, prompt in turns]
        ids, requests = [prompt.token_ids for prompt in prompts], [prompt.request for prompt in prompts]
        answers = {}
        for lane in (*lanes[first:], *lanes[:first]):
            answers[lane.name], clock = lane.generator.generate(lane.models, ids, lane.mode, requests)
            while clock.compile_seconds:  # again, so that no rate includes a first-run cost
                figures[lane.name]["clock"].compile_seconds += clock.compile_seconds
                answers[lane.name], clock = lane.generator.generate(lane.models, ids, lane.mode, requests)
            add_clock(figures[lane.name]["clock"], clock)
        for lane in lanes:
            for prompt, answer in zip(prompts, answers[lane.name], strict=True):
                text = codec.decode(answer.token_ids)
                lines.append(generation_row(prompt.answer_id, lane.mode, answer, text, lane.drafter))
        reference = answers[(baseline or lanes[0]).name]
        for lane in compared:
            both = reference, answers[lane.name]
            diverged = divergences(baseline.models, baseline.generator, ids, *both, requests)
            figures[lane.name]["divergences"] += [_divergence(entry, *turns[entry.prompt]) for entry in diverged]
        turns = [
            (place, prompt.next_turn(codec.decode(answer.token_ids), codec))
            for (place, prompt), answer in zip(turns, reference, strict=True)
            if prompt.later_turns
        ]
    record = {name: {**values, "clock": vars(values["clock"])} for name, values in figures.items()}
    return {"group": group.number, "task": group.task, "lanes": record}, lines


def _divergence(divergence: Divergence, place: int, prompt: Prompt) -> dict[str, Any]:
    """JSON values; a text that ends early has no margin, and JSON no infinity."""
    return {
        "prompt": place,
        "id": prompt.answer_id,
        "position": divergence.position,
        "margin": divergence.margin if math.isfinite(divergence.margin) else None,
        "near_tie": bool(divergence.near_tie),
    }


def time_rounds(lanes: Mapping[str, Lane], prompts: Sequence[Prompt]) -> dict[str, dict[str, float]]:
    """By mode the seconds of a round's parts, and those of a plain step; nothing where no mode drafts."""
    drafting = [mode for mode in lanes if mode != BASELINE]
    if not drafting:
        return {}
    models, generator = lanes[drafting[0]].models, lanes[drafting[0]].generator
    first = prompts[: generator.settings.batch_size]
    with Progress("time the parts of a round", total=1) as progress:
        state = generator.start(models, [prompt.token_ids for prompt in first], list(range(len(first))))
        split = round_split(models, generator, state, [BASELINE, *drafting])
        progress.advance(1)
    return split
