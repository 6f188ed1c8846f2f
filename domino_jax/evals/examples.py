"""Example answers for a report: a few prompts, and their answers round by round."""

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domino_jax.evals.lanes import Lane
from domino_jax.evals.prompts import Prompt, TextCodec
from domino_jax.evals.run_files import GENERATIONS
from domino_jax.method.settings import BASELINE

EXAMPLES = 4  # prompts of a report


@dataclasses.dataclass(frozen=True)
class ShownAnswer:
    """One answer of a mode. first: the token of the prefill.  rounds: the tokens that each round emitted."""

    mode: str
    first: int
    rounds: list[list[int]]

    @property
    def tau(self) -> float | None:
        return statistics.fmean(map(len, self.rounds)) if self.rounds else None


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt, as text where there is a tokenizer, and its answers in the modes that draft."""

    prompt: Prompt
    text: str | None
    answers: list[ShownAnswer]


def collect_examples(lanes: Sequence[Lane], prompts: Sequence[Prompt], codec: TextCodec, folder: Path) -> list[Example]:
    """EXAMPLES prompts, from the lowest to the highest τ of the last lane.

    Args:
        lanes: the modes of one drafter.  folder: holds generations.jsonl.
    """
    drafting = [lane for lane in lanes if lane.mode != BASELINE]
    if not drafting:
        return []
    modes, last = [lane.mode for lane in drafting], drafting[-1]
    by_id = {prompt.id: prompt for prompt in prompts}
    chosen = _spread([row for row in _rows(folder, last.drafter) if row["mode"] == last.mode and row["id"] in by_id])
    answers: dict[str, list[ShownAnswer]] = {name: [] for name in chosen}
    for row in _rows(folder, last.drafter):
        if row["id"] in answers and row["mode"] in modes:
            answers[row["id"]].append(_answer(row))
    return [Example(by_id[name], codec.decode_prompt(by_id[name]), answers[name]) for name in chosen]


def _rows(folder: Path, drafter: str | None) -> Iterator[dict[str, Any]]:
    with (folder / GENERATIONS).open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if "drafter" not in row or row["drafter"] == drafter:
                yield row


def _spread(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of at most EXAMPLES rows, evenly spaced from the lowest τ to the highest."""
    ordered = sorted((statistics.fmean(row["accept_lengths"]), row["id"]) for row in rows if row["accept_lengths"])
    places = np.unique(np.linspace(0, len(ordered) - 1, EXAMPLES).round()) if ordered else ()
    return [ordered[int(place)][1] for place in places]


def _answer(row: Mapping[str, Any]) -> ShownAnswer:
    first, *rest = row["token_ids"]
    ends = np.cumsum(row["accept_lengths"])[:-1]
    rounds = [part.tolist() for part in np.split(np.asarray(rest, int), ends)] if rest else []
    return ShownAnswer(row["mode"], first, rounds)
