"""Example answers for a report: a few prompts, their answers round by round, and the drafts that were rejected.

The measured run records no drafts. They are recomputed after it, for the few prompts that are shown.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from domino_jax.decoding.generate import Generator
from domino_jax.decoding.loop import DecodeState
from domino_jax.decoding.propose import propose
from domino_jax.decoding.rounds import TreeRound, speculative_round, tree_round
from domino_jax.decoding.settings import BASELINE, TREE
from domino_jax.drafters.pair import Models
from domino_jax.evals.lanes import Lane
from domino_jax.evals.prompts import Prompt, TextCodec
from domino_jax.evals.run_files import GENERATIONS
from domino_jax.runtime.progress import Progress

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
class Answer:
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
    answers: list[Answer]


def collect_examples(lanes: Sequence[Lane], prompts: Sequence[Prompt], codec: TextCodec, folder: Path) -> list[Example]:
    """EXAMPLES prompts from the lowest to the highest τ of the last lane, whose rejected drafts are recomputed.

    Args:
        lanes: the modes of one drafter.  folder: holds generations.jsonl.
    """
    drafting = [lane for lane in lanes if lane.mode != BASELINE]
    if not drafting:
        return []
    modes, last = [lane.mode for lane in drafting], drafting[-1]
    by_id = {prompt.id: prompt for prompt in prompts}
    chosen = _spread([row for row in _rows(folder, last.drafter) if row["mode"] == last.mode and row["id"] in by_id])
    answers: dict[str, dict[str, Answer]] = {name: {} for name in chosen}
    for row in _rows(folder, last.drafter):
        if row["id"] in answers and row["mode"] in modes:
            answers[row["id"]][row["mode"]] = _answer(row)
    # Acceptance that is forced has no rejected drafts, and one process cannot read what others computed.
    if last.generator.settings.simulated_tau is None and jax.process_count() == 1:
        recorded = record_rounds(last, [by_id[name] for name in chosen])
        for name, rounds in zip(chosen, recorded, strict=True):
            answers[name][last.mode] = with_drafts(answers[name][last.mode], rounds)
    return [Example(by_id[name], codec.decode_prompt(by_id[name]), list(answers[name].values())) for name in chosen]


def _rows(folder: Path, drafter: str | None):
    with (folder / GENERATIONS).open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if "drafter" not in row or row["drafter"] == drafter:
                yield row


def _spread(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of at most EXAMPLES rows, evenly spaced from the lowest τ to the highest."""
    taus = [
        (sum(row["accept_lengths"]) / len(row["accept_lengths"]), row["id"]) for row in rows if row["accept_lengths"]
    ]
    ordered = [name for _, name in sorted(taus)]
    last = len(ordered) - 1
    places = {round(place * last / max(EXAMPLES - 1, 1)) for place in range(EXAMPLES)} if ordered else ()
    return [ordered[place] for place in sorted(places)]


def _answer(row: Mapping[str, Any]) -> Answer:
    first, *rest = row["token_ids"]
    rounds, start = [], 0
    for length in row["accept_lengths"]:
        rounds.append(Round(rest[start : start + length]))
        start += length
    return Answer(row["mode"], first, rounds)


def with_drafts(answer: Answer, recorded: Sequence[Round]) -> Answer:
    """The answer with recomputed rounds, up to the first that emitted something else (a near tie)."""
    rounds = list(answer.rounds)
    for place, (measured, again) in enumerate(zip(answer.rounds, recorded, strict=False)):
        if measured.token_ids != again.token_ids:
            break
        rounds[place] = again
    return dataclasses.replace(answer, rounds=rounds)


def record_rounds(lane: Lane, prompts: Sequence[Prompt]) -> list[list[Round]]:
    """The first MOST_ROUNDS rounds of each prompt with the rejected drafts, decoded again one by one."""
    one_round = jax.jit(functools.partial(_one_round, lane.generator, lane.mode))
    recorded = []
    with Progress("drafts of the examples", total=len(prompts)) as progress:
        for prompt in prompts:
            state = lane.generator.start(lane.models, [prompt.token_ids], [prompt.request], rows=1)
            rounds: list[Round] = []
            while len(rounds) < MOST_ROUNDS and not state.done[0]:
                before = int(state.counts[0])
                state, seen = one_round(lane.models, state)
                emitted = state.tokens[0, before : int(state.counts[0])].tolist()
                tree = lane.mode == TREE
                rounds.append(tree_drafts(emitted, seen) if tree else chain_drafts(emitted, seen[0].tolist()))
            recorded.append(rounds)
            progress.advance(1)
    return recorded


def _one_round(generator: Generator, mode: str, models: Models, state: DecodeState):
    """The state after one round, and its drafts int32 [B, M] or its TreeRound."""
    settings, sampling = generator.drafting(mode), generator.settings.sampling
    if mode == TREE:
        return tree_round(models, state, generator.stop_ids, sampling, settings)
    drafts, _ = propose(models, state, state.sampling or sampling, settings)
    isolated = generator.settings.fixed_shape
    return speculative_round(models, state, generator.stop_ids, sampling, settings, isolated=isolated), drafts


def chain_drafts(emitted: list[int], drafts: list[int]) -> Round:
    """A round of a chain. Where the answer ended inside it, its last token can be a draft, and none was rejected."""
    last = len(emitted) - 1
    ended = last < len(drafts) and drafts[last] == emitted[last]
    return Round(emitted, not ended, [] if ended else drafts[last:])


def tree_drafts(emitted: list[int], seen: TreeRound) -> Round:
    """A round of a tree: the rejected drafts are the children of the last accepted node."""
    accepted, tree = int(seen.accepted[0]), seen.tree
    if len(emitted) <= accepted:
        return Round(emitted, False, [])
    children = (tree.parents[0] == seen.path[0, accepted]) & (tree.depths[0] > 0)
    return Round(emitted, True, tree.tokens[0][children].tolist())
