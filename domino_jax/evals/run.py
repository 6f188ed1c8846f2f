"""The run behind a decoding report: prompt rows through lanes (modes, drafters), group by group, into files and sums.

A group is what runs together before the next lane has its turn: one prompt at batch size 1, else four batches, so that
rows which end early are replaced for most of it. Nothing but sums, a few numbers an answer and the prompts' own text is
kept, so memory does not grow with what is generated.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import check_text
from domino_jax.data.tiny_checks import check_answer
from domino_jax.decoding.generate import Clock, Generation
from domino_jax.decoding.requests import request_of
from domino_jax.evals.lanes import Lane, ModeRun, add_clock, baseline_of, take_turns
from domino_jax.evals.near_ties import Divergence, divergences
from domino_jax.evals.run_files import RunFiles, generation_row, read_generation
from domino_jax.runtime.errors import DataError, quote
from domino_jax.runtime.progress import Progress

BATCHES_IN_A_GROUP = 4


@dataclasses.dataclass(frozen=True)
class Speech:
    """From rows to token ids and back to text. tokenizer: the target's, None where it has none (ids only)."""

    tokenizer: Any
    thinking: bool

    def encode(self, row: Mapping[str, Any]) -> list[int]:
        return encode_prompt(self.tokenizer, row, self.thinking, f"prompt {row['id']}")

    def text(self, token_ids: Sequence[int]) -> str | None:
        """The answer without special tokens, None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)


@dataclasses.dataclass(frozen=True)
class Group:
    """Prompt rows that run together. first: the place of the first one among all rows.

    requests: noise ids, the places of the rows in their own task, so that a task gives the same text alone and among
    others (DESIGN §4).
    """

    number: int
    task: str | None
    first: int
    rows: Sequence[Mapping[str, Any]]
    requests: Sequence[int]


@dataclasses.dataclass
class Measured:
    """What a run keeps, by lane name: of all rows, and of each task where rows have one."""

    runs: dict[str, ModeRun]
    tasks: dict[str, dict[str, ModeRun]] = dataclasses.field(default_factory=dict)

    @classmethod
    def empty(cls, lanes: Sequence[Lane]) -> "Measured":
        return cls({lane.name: ModeRun() for lane in lanes})

    def absorb(self, record: Mapping[str, Any], answers: Mapping[str, Sequence[Generation]]) -> None:
        """Counts a finished group: its record in progress.jsonl, and its answers by lane."""
        places = [self.runs]
        if record["task"] is not None:
            places.append(self.tasks.setdefault(record["task"], {name: ModeRun() for name in self.runs}))
        for runs in places:
            for name, run in runs.items():
                figures = record["lanes"][name]
                run.add(answers[name])
                run.add_group(Clock(**figures["clock"]))
                run.answers_right += figures["right"]
                if figures["divergences"] is not None:
                    run.add_comparison(len(answers[name]), figures["divergences"])


def plan_groups(rows: Sequence[Mapping[str, Any]], batch_size: int) -> list[Group]:
    """Groups in the order of the rows; none holds rows of two tasks."""
    size = BATCHES_IN_A_GROUP * batch_size if batch_size > 1 else 1
    groups, begin, start = [], 0, 0  # of the task, of the group
    for end in range(1, len(rows) + 1):
        last_of_task = end == len(rows) or rows[end].get("task") != rows[start].get("task")
        if last_of_task or end - start == size:
            requests = range(start - begin, end - begin)
            groups.append(Group(len(groups), rows[start].get("task"), start, rows[start:end], requests))
            begin, start = (end if last_of_task else begin), end
    return groups


def check_rows(lanes: Sequence[Lane], rows: Sequence[Mapping[str, Any]], speech: Speech) -> None:
    """Raises DataError for the first row that cannot be asked or does not fit, before anything runs.

    Of a conversation the longest possible one has to fit: every answer but the last as long as an answer may be.
    """
    generators = list({id(lane.generator): lane.generator for lane in lanes}.values())
    for row in rows:
        check_words(row, f"prompt {quote(row['id'])[1:-1]}", speech.tokenizer)
        prompt, where = speech.encode(row), f"prompt {row['id']}"
        for generator in generators:
            generator.check_prompt(prompt, where, request_of(row, 0))
        later = later_turns(row)
        if not later:
            continue
        silent = row
        for turn in later:
            silent = next_row(silent, "", turn)
        said, answers = len(speech.encode(silent)), len(later) + 1
        for generator in generators:
            limits = generator.limits
            limits.check_positions(said, answers * limits.max_new_tokens, f"{where}, of {answers} turns,")
            longest = said + answers * limits.max_new_tokens + limits.block_rows
            if longest > limits.cache_slots:
                raise DataError(
                    f"{where} has {answers} turns, which may need {longest} cache rows with"
                    f" {limits.max_new_tokens} new tokens each, but decode.cache_length is {limits.cache_slots};"
                    " raise it, or lower max_new_tokens."
                )


def check_words(row: Mapping[str, Any], where: str, tokenizer: Any) -> None:
    """Raises DataError for what can be neither encoded nor written, and for a checker that could not judge later.

    tokenizer: the target's; without one there is no text to judge.
    """
    check_text(row, where)
    if tokenizer is None or not has_checker(row):
        return
    try:
        check_answer(row, "")
    except Exception as error:  # it parses the row's code, and what Python's parser raises depends on the code
        raise DataError(
            f"{where} brings kind {quote(row['kind'])} and an answer_check that cannot judge"
            f" ({type(error).__name__}: {str(error)[:100]}); correct them, or take answer_check out."
        ) from error


def later_turns(row: Mapping[str, Any]) -> Sequence[str]:
    return row["next_turns"] if "next_turns" in row else ()


def next_row(row: Mapping[str, Any], answer: str, turn: str) -> dict[str, Any]:
    """The row with the answer and the user's next turn in its history."""
    said = [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return {**row, "messages": [*row["messages"], *said]}


def run_lanes(
    lanes: Sequence[Lane],
    rows: Sequence[Mapping[str, Any]],
    speech: Speech,
    batch_size: int,
    files: RunFiles,
    simulated: bool = False,
) -> Measured:
    """All rows through all lanes; groups that `files` holds from earlier sittings are counted and not run again.

    simulated: outputs are forced and not the target's, so none is compared.
    """
    measured = Measured.empty(lanes)
    groups = plan_groups(rows, batch_size)
    done = 0
    for record, lines in files.replay():
        if "group" in record:
            absorb_group(measured, lanes, record, lines)
            done += 1
    total = sum(_generations(group) for group in groups) * len(lanes)
    before = sum(_generations(group) for group in groups[:done]) * len(lanes)
    with Progress("decode", total=total, done=before) as progress:
        for group in groups[done:]:
            record, lines = decode_group(lanes, group, speech, simulated)
            files.append(record, lines)
            absorb_group(measured, lanes, record, lines)
            progress.advance(_generations(group) * len(lanes), group.task or "")
    return measured


def _generations(group: Group) -> int:
    return sum(1 + len(later_turns(row)) for row in group.rows)


def absorb_group(
    measured: Measured, lanes: Sequence[Lane], record: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> None:
    """Counts a finished group from what is on disk of it, or will be."""
    measured.absorb(record, _by_lane(lanes, lines))


def _by_lane(lanes: Sequence[Lane], lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Generation]]:
    names = {(lane.drafter, lane.mode): lane.name for lane in lanes}
    answers: dict[str, list[Generation]] = {lane.name: [] for lane in lanes}
    for line in lines:
        drafter = line["drafter"] if "drafter" in line else None
        answers[names[drafter, line["mode"]]].append(read_generation(line))
    return answers


def decode_group(
    lanes: Sequence[Lane], group: Group, speech: Speech, simulated: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One group through all lanes, turn by turn: its record and its rows of generations.jsonl.

    All lanes get the same prompts: a later turn's history holds the baseline's answer (the first lane's without one),
    which in a lossless mode is the mode's own.
    """
    baseline = baseline_of(lanes)
    compared = [lane for lane in lanes if baseline and lane is not baseline and not simulated]
    clocks = {lane.name: Clock() for lane in lanes}
    right = dict.fromkeys(clocks, 0)
    found: dict[str, list] = {lane.name: [] for lane in compared}
    lines, rows = [], list(group.rows)
    for turn in range(1 + max(len(later_turns(row)) for row in rows)):
        places = [place for place, row in enumerate(rows) if turn <= len(later_turns(row))]
        prompts = [speech.encode(rows[place]) for place in places]
        requests = [request_of(rows[place], group.requests[place]) for place in places]
        names = [turn_name(rows[place]["id"], turn) for place in places]
        measured = take_turns(lanes, prompts, requests, group.number)
        for lane in lanes:
            answers, clock = measured[lane.name]
            add_clock(clocks[lane.name], clock)
            for place, name, answer in zip(places, names, answers, strict=True):
                text = speech.text(answer.token_ids)
                lines.append(generation_row(name, lane.mode, answer, text, lane.drafter))
                right[lane.name] += turn == 0 and is_right(rows[place], text)
        for lane in compared:
            both = measured[baseline.name][0], measured[lane.name][0]
            parted = divergences(baseline.models, baseline.generator, prompts, *both, requests)
            found[lane.name] += [
                _divergence(one, group.first + places[one.prompt], names[one.prompt]) for one in parted
            ]
        for place, answer in zip(places, measured[(baseline or lanes[0]).name][0], strict=True):
            if turn < len(later_turns(rows[place])):
                said = speech.text(answer.token_ids)
                rows[place] = next_row(rows[place], said, later_turns(rows[place])[turn])
    figures = {
        name: {"clock": vars(clock), "right": right[name], "divergences": found[name] if name in found else None}
        for name, clock in clocks.items()
    }
    return {"group": group.number, "task": group.task, "lanes": figures}, lines


def turn_name(name: str, turn: int) -> str:
    """The id of a row's answer: the row's own, and "#2", "#3" behind it for later turns."""
    return f"{name}#{turn + 1}" if turn else name


def _divergence(divergence: Divergence, place: int, name: str) -> dict[str, Any]:
    """JSON values; a text that ends early has no margin, and JSON no infinity."""
    margin = divergence.margin if math.isfinite(divergence.margin) else None
    near_tie = bool(divergence.near_tie)
    return {"prompt": place, "id": name, "position": divergence.position, "margin": margin, "near_tie": near_tie}


def has_checker(row: Mapping[str, Any]) -> bool:
    return "answer_check" in row and "kind" in row


def is_right(row: Mapping[str, Any], text: str | None) -> bool:
    """Whether the row brings a checker and it accepts the text."""
    return text is not None and has_checker(row) and check_answer(row, text)


def fingerprint(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tells prompt files apart that have the same name."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode())
    return digest.hexdigest()
