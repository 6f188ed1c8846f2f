"""Example answers for a report: a few prompts, their answers round by round, and the drafts that were rejected.

The measured run records no drafts. They are recomputed after it, for the few prompts that are shown.
"""

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from domino_jax.evals.lanes import Lane, record_rounds
from domino_jax.evals.prompts import Prompt, TextCodec
from domino_jax.evals.run_files import GENERATIONS
from domino_jax.method.propose import NO_DRAFT
from domino_jax.method.rounds import TreeRound
from domino_jax.method.settings import BASELINE, TREE

EXAMPLES = 4  # prompts of a report
MOST_ROUNDS = 64  # rounds of an answer whose drafts are recomputed


@dataclasses.dataclass(frozen=True)
class Round:
    """What one round emitted. bonus: whether the last of these tokens is the target's, the others accepted drafts.

    rejected: the drafts after the accepted ones; of a tree, those beside the bonus token. None where not recomputed.
    """

    token_ids: list[int]
    bonus: bool = True
    rejected: list[int] | None = None


@dataclasses.dataclass(frozen=True)
class ShownAnswer:
    """One answer of a mode. first: the token of the prefill."""

    mode: str
    first: int
    rounds: list[Round]

    @property
    def tau(self) -> float | None:
        return sum(len(one.token_ids) for one in self.rounds) / len(self.rounds) if self.rounds else None


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt, as text where there is a tokenizer, and its answers in the modes that draft."""

    prompt: Prompt
    text: str | None
    answers: list[ShownAnswer]


def collect_examples(lanes: Sequence[Lane], prompts: Sequence[Prompt], codec: TextCodec, folder: Path) -> list[Example]:
    """EXAMPLES prompts, from the lowest to the highest τ of the last lane, with recomputed rejected drafts.

    Args:
        lanes: the modes of one drafter.  folder: holds generations.jsonl.
    """
    drafting = [lane for lane in lanes if lane.mode != BASELINE]
    if not drafting:
        return []
    modes, last = [lane.mode for lane in drafting], drafting[-1]
    by_id = {prompt.id: prompt for prompt in prompts}
    chosen = _spread([row for row in _rows(folder, last.drafter) if row["mode"] == last.mode and row["id"] in by_id])
    answers: dict[str, dict[str, ShownAnswer]] = {name: {} for name in chosen}
    for row in _rows(folder, last.drafter):
        if row["id"] in answers and row["mode"] in modes:
            answers[row["id"]][row["mode"]] = _answer(row)
    # Acceptance that is forced has no rejected drafts, and one process cannot read what others computed.
    if not last.generator.settings.simulate_tau and jax.process_count() == 1:
        drafts_of = tree_drafts if last.mode == TREE else chain_drafts
        recorded = record_rounds(last, [by_id[name] for name in chosen], MOST_ROUNDS)
        for name, rounds in zip(chosen, recorded, strict=True):
            again = [drafts_of(emitted, seen) for emitted, seen in rounds]
            answers[name][last.mode] = with_drafts(answers[name][last.mode], again)
    return [Example(by_id[name], codec.decode_prompt(by_id[name]), list(answers[name].values())) for name in chosen]


def _rows(folder: Path, drafter: str | None):
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
    rounds, start = [], 0
    for length in row["accept_lengths"]:
        rounds.append(Round(rest[start : start + length]))
        start += length
    return ShownAnswer(row["mode"], first, rounds)


def with_drafts(answer: ShownAnswer, recorded: Sequence[Round]) -> ShownAnswer:
    """The answer with recomputed rounds, up to the first that emitted something else (a near tie)."""
    rounds = list(answer.rounds)
    for place, (measured, again) in enumerate(zip(answer.rounds, recorded, strict=False)):
        if measured.token_ids != again.token_ids:
            break
        rounds[place] = again
    return dataclasses.replace(answer, rounds=rounds)


def chain_drafts(emitted: list[int], seen: np.ndarray) -> Round:
    """A round with drafts [1, M]. If the answer ended inside it, its last token can be a draft, with none rejected.

    A chain that ended where the drafter was not sure has fewer drafts.
    """
    drafts, last = [token for token in seen[0].tolist() if token != NO_DRAFT], len(emitted) - 1
    ended = last < len(drafts) and drafts[last] == emitted[last]
    return Round(emitted, not ended, [] if ended else drafts[last:])


def tree_drafts(emitted: list[int], seen: TreeRound) -> Round:
    """A round of a tree: the rejected drafts are the children of the last accepted node."""
    accepted, tree = int(seen.accepted[0]), seen.tree
    if len(emitted) <= accepted:
        return Round(emitted, False, [])
    children = (tree.parents[0] == seen.path[0, accepted]) & (tree.depths[0] > 0)
    return Round(emitted, True, tree.tokens[0][children].tolist())
