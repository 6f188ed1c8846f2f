"""A measured run: prompts in every mode, group by group, into files, sums and the report.

A group is what runs together before the next mode runs: one prompt at batch size 1, else four batches, so that rows
which end early are replaced for most of it. Only sums, a few numbers per answer and the prompts are held, so memory
does not grow with what is generated.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import Clock, Generation, Generator, new_generator
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.settings import BASELINE, DecodeSettings
from domino_jax.evals.mode_run import ModeRun, add_clock, figures_of, ratio
from domino_jax.evals.near_ties import divergences
from domino_jax.evals.report import build_report, write_report
from domino_jax.evals.round_times import round_split
from domino_jax.evals.run_files import RunFiles, write_answers
from domino_jax.evals.run_info import RunInfo
from domino_jax.method.pair import Pair
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import from_primary, refuse_differences
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.progress import Progress
from domino_jax.weights.loading import LoadedTarget

BATCHES_IN_A_GROUP = 4
SPLIT = ("draft", "head", "verify", "other", "round", "commit")


def decode_prompts(
    target: LoadedTarget,
    models: Pair,
    settings: DecodeSettings,
    prompts: Sequence[Prompt],
    info: RunInfo,
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Decodes prompts in every mode into the folder `output` and returns the report.

    Args:
        target: for its tokenizer and stop ids; `models` has the weights that run.
        settings: in effect, which fit the drafter.  prompts: for which there is room (prompts_with_room).
        restart: begin from scratch where `output` holds a decoding of something else, instead of refusing it.
    """
    if (most := max(settings.concurrency, default=0)) > len(prompts):
        raise DominoError(
            f"decode.concurrency has {most}, but there are {len(prompts)} prompts, which would be fewer rows; decode"
            " more prompts, or lower it."
        )
    refuse_differences({"what is decoded": info.origin()})
    sections = info.as_json(target, models, settings, prompts)
    generator, codec = new_generator(models, settings, target.stop_ids), TextCodec(target.tokenizer, settings.thinking)
    runner, primary = Runner(models, generator, codec), distributed.is_primary()
    with RunFiles(output, info.origin(), restart) if primary else contextlib.nullcontext() as files:
        measured = runner.run(prompts, files)
    concurrency = measure_concurrency(runner, target.stop_ids, prompts, sections["round_widths"])
    report = build_report(sections, measured.runs, measured.tasks, concurrency, runner.time_rounds(prompts))
    if primary:
        write_answers(output, prompts, codec, settings)
        write_report(output, report)
    return report


def measure_concurrency(
    runner: "Runner", stop_ids: Sequence[int], prompts: Sequence[Prompt], widths: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """By batch size of decode.concurrency, the figures of every mode, of first turns only. widths: of figures_of."""
    first_turns = [dataclasses.replace(prompt, later_turns=(), task=None) for prompt in prompts]
    settings, levels = runner.generator.settings, {}
    for size in settings.concurrency:
        resized = runner
        if size != settings.batch_size:  # else nothing has to be compiled again
            generator = new_generator(runner.models, settings.change(batch_size=size), stop_ids)
            resized = dataclasses.replace(runner, generator=generator)
        levels[str(size)] = figures_of(resized.run(first_turns).runs, widths)
    return levels


def plan_groups(prompts: Sequence[Prompt], batch_size: int) -> list[Sequence[Prompt]]:
    """Groups in the order of the prompts; none holds prompts of two tasks."""
    size = BATCHES_IN_A_GROUP * batch_size if batch_size > 1 else 1
    groups, start = [], 0
    for end in range(1, len(prompts) + 1):
        if end == len(prompts) or prompts[end].task != prompts[start].task or end - start == size:
            groups.append(prompts[start:end])
            start = end
    return groups


class Measured:
    """Sums by mode, of all prompts and of each task where prompts have one."""

    def __init__(self, modes: Sequence[str]):
        self.runs = {mode: ModeRun() for mode in modes}
        self.tasks: dict[str, dict[str, ModeRun]] = {}

    def add(self, group: Mapping[str, Any]) -> None:
        """Counts a group, as Runner.decode_group returns it."""
        sums = [self.runs]
        if group["task"] is not None:
            sums.append(self.tasks.setdefault(group["task"], {mode: ModeRun() for mode in self.runs}))
        for mode, figures in group["modes"].items():
            rows = [row for row in group["rows"] if row["mode"] == mode]
            for runs in sums:
                runs[mode].add(rows, Clock(**figures["clock"]), figures["divergences"])


@dataclasses.dataclass(frozen=True)
class Runner:
    """Decodes groups of prompts in the modes of the generator's settings, which alternate."""

    models: Pair
    generator: Generator
    codec: TextCodec

    @property
    def modes(self) -> tuple[str, ...]:
        """Plain decoding, which the others are compared with, is the first one."""
        return tuple(sorted(self.generator.settings.modes, key=lambda mode: mode != BASELINE))

    def run(self, prompts: Sequence[Prompt], files: RunFiles | None = None) -> Measured:
        """Decodes all prompts; groups that `files` holds from earlier starts are counted and not run again."""
        # Process 0 alone has files, and with them the sums of all groups.
        measured, done = Measured(self.modes), from_primary(lambda: files.done if files else 0)
        groups = plan_groups(prompts, self.generator.settings.batch_size)
        for group in files.replay() if files else ():
            measured.add(group)
        answers = [len(self.modes) * sum(prompt.turns_left for prompt in group) for group in groups]
        name = f"decode, {self.generator.settings.batch_size} at a time"
        progress = Progress(name, total=sum(answers), done=sum(answers[:done]))
        for number in range(done, len(groups)):
            group = self.decode_group(number, groups[number])
            if files:
                files.append(group)
            measured.add(group)
            progress.advance(answers[number], group["task"] or "")
        return measured

    def decode_group(self, number: int, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Decodes one group in all modes, turn by turn.

        The history of a later turn holds the first mode's answer, plain decoding's if there is one. The group's number
        determines which mode begins: so a noisy machine disturbs all modes alike.

        Returns:
            JSON values: "task", "modes" (by mode its "clock" and its "divergences" from plain decoding, None where it
            is not compared) and "rows" of generations.jsonl.
        """
        modes, start, task = self.modes, number % len(self.modes), prompts[0].task
        clocks, rows = {mode: Clock() for mode in modes}, []
        differing = {mode: None if modes[0] != BASELINE or mode == BASELINE else [] for mode in modes}
        while prompts:
            ids, requests = [prompt.token_ids for prompt in prompts], [prompt.request for prompt in prompts]
            answers = {}
            for mode in (*modes[start:], *modes[:start]):
                answers[mode], clock = self.generator.generate(self.models, ids, mode, requests)
                while clock.compile_seconds:  # again, so that no rate includes a first-run cost
                    clocks[mode].compile_seconds += clock.compile_seconds
                    answers[mode], clock = self.generator.generate(self.models, ids, mode, requests)
                add_clock(clocks[mode], clock)
            reference = answers[modes[0]]
            for mode in modes:
                rows += map(self.generation_row, prompts, itertools.repeat(mode), answers[mode])
                if differing[mode] is not None:
                    found = divergences(self.models, self.generator, ids, reference, answers[mode], requests)
                    differing[mode] += [{**one._asdict(), "prompt": prompts[one.prompt].answer_id} for one in found]
            prompts = [
                prompt.next_turn(self.codec.decode(answer.token_ids), self.codec)
                for prompt, answer in zip(prompts, reference, strict=True)
                if prompt.later_turns
            ]
        figures = {mode: {"clock": vars(clocks[mode]), "divergences": differing[mode]} for mode in modes}
        return {"task": task, "modes": figures, "rows": rows}

    def generation_row(self, prompt: Prompt, mode: str, answer: Generation) -> dict[str, Any]:
        text = self.codec.decode(answer.token_ids)
        named = {"id": prompt.answer_id, "mode": mode, "token_ids": answer.token_ids, "text": text}
        return {**named, "accept_lengths": answer.accept_lengths, "finish_reason": answer.finish_reason}

    def time_rounds(self, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
        """By mode that drafts: {"time_split", "break_even_tau"} of the report."""
        drafting = [mode for mode in self.modes if mode != BASELINE]
        if not drafting:
            return {}
        models, generator = self.models, self.generator
        first = prompts[: generator.settings.batch_size]
        state = generator.start(models, [prompt.token_ids for prompt in first], list(range(len(first))))
        split = round_split(models, generator, state, [BASELINE, *drafting])
        step = split[BASELINE]["round"]
        return {
            mode: {
                "time_split": {
                    "unit": "milliseconds per round",
                    **{part: split[mode][part] * 1e3 if part in split[mode] else None for part in SPLIT},
                    "step": step * 1e3,
                    "drafts": generator.drafting(mode).verified(models.drafter.config),
                },
                "break_even_tau": ratio(split[mode]["round"], step),
            }
            for mode in drafting
        }
