"""Lanes: modes and drafters that answer the same prompts alternately, figures of their answers, recordings."""

import array
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from domino_jax.decoding.generate import Clock, Generation, Generator
from domino_jax.evals.prompts import Prompt
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Models
from domino_jax.method.propose import propose
from domino_jax.method.rounds import TreeRound, tree_round
from domino_jax.method.settings import BASELINE, TREE
from domino_jax.runtime.progress import Progress

# Divergences that a report lists; all are counted.
LISTED = 100


@dataclasses.dataclass(frozen=True)
class Lane:
    """One column of a measurement: a mode with the models and the generator that run it.

    name: unique among the lanes of a measurement.  drafter: the drafter's name where there are several.
    """

    name: str
    mode: str
    models: Models
    generator: Generator
    drafter: str | None = None


@dataclasses.dataclass
class ModeRun:
    """Figures of one mode's answers: sums, and a few numbers per answer; no text and no list of tokens.

    clock: sums over all groups.  histogram: rounds by the tokens they emitted.  digests: of the answers that differ.
    emitted, rounds: per answer, tokens emitted in rounds and how many rounds; steps: the loop's steps, plain or not.
    group_seconds, group_tokens: per group of prompts that ran together, the loop's seconds and tokens.
    compared: answers compared with the baseline's (None where that was not done); diverged, near_ties: how many differ.
    answers_right: answers that a checker accepts.
    """

    clock: Clock = dataclasses.field(default_factory=Clock)
    tokens: int = 0
    stopped: int = 0
    steps: int = 0
    histogram: Counter = dataclasses.field(default_factory=Counter)
    digests: set[bytes] = dataclasses.field(default_factory=set)
    emitted: array.array = dataclasses.field(default_factory=lambda: array.array("q"))
    rounds: array.array = dataclasses.field(default_factory=lambda: array.array("q"))
    group_seconds: array.array = dataclasses.field(default_factory=lambda: array.array("d"))
    group_tokens: array.array = dataclasses.field(default_factory=lambda: array.array("q"))
    compared: int | None = None
    diverged: int = 0
    near_ties: int = 0
    first_divergences: list[Mapping] = dataclasses.field(default_factory=list)
    answers_right: int = 0

    @property
    def answers(self) -> int:
        return len(self.rounds)

    def add(self, answers: Sequence[Generation]) -> None:
        """Counts answers without keeping their token ids."""
        for answer in answers:
            self.tokens += len(answer.token_ids)
            self.stopped += answer.finish_reason == "stop"
            self.steps += len(answer.accept_lengths) or len(answer.token_ids) - 1
            self.histogram.update(answer.accept_lengths)
            self.digests.add(hashlib.blake2b(np.asarray(answer.token_ids, np.int32).tobytes(), digest_size=16).digest())
            self.emitted.append(sum(answer.accept_lengths))
            self.rounds.append(len(answer.accept_lengths))

    def add_group(self, clock: Clock) -> None:
        """Counts the time of a group of prompts whose answers were added."""
        add_clock(self.clock, clock)
        self.group_seconds.append(clock.decode_seconds)
        self.group_tokens.append(clock.decode_tokens)

    def add_comparison(self, answers: int, differing: Sequence[Mapping]) -> None:
        """Counts `answers` compared with the baseline's, and where they differ: {"near_tie", …} each."""
        self.compared = (self.compared or 0) + answers
        self.diverged += len(differing)
        self.near_ties += sum(entry["near_tie"] for entry in differing)
        self.first_divergences += differing[: LISTED - len(self.first_divergences)]


def add_clock(total: Clock, part: Clock) -> None:
    """Adds every figure of `part` to `total`."""
    for field in dataclasses.fields(Clock):
        setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))


def baseline_of(lanes: Sequence[Lane]) -> Lane | None:
    """The lane that the others are compared with."""
    return next((lane for lane in lanes if lane.mode == BASELINE), None)


# --------------------------------------------------------------------------------------------------- recordings


def record_rounds(lane: Lane, prompts: Sequence[Prompt], most: int) -> list[list[tuple[list[int], Any]]]:
    """For each prompt, decoded alone, its first rounds: (tokens emitted, drafts int32 [1, M] or the TreeRound).

    A measured run reads none of this; a recording is not timed. most: rounds of a prompt.
    """
    one_round = _recorder(lane)
    recorded = []
    with Progress("record rounds", total=len(prompts)) as progress:
        for prompt in prompts:
            plain = lane.generator.plain(lane.mode)
            state = lane.generator.start(lane.models, [prompt.token_ids], [prompt.request], plain, rows=1)
            rounds = []
            while len(rounds) < most and not state.done[0]:
                before = int(state.counts[0])
                state, seen = one_round(state)
                emitted = jax.device_get(state.tokens)[0, before : int(state.counts[0])].tolist()
                rounds.append((emitted, jax.device_get(seen)))
            recorded.append(rounds)
            progress.advance(1)
    return recorded


def _recorder(lane: Lane) -> Callable[[DecodeState], tuple[DecodeState, Any]]:
    """state → (state after one round, what it drafted). In a chain only the draft is a separate program."""
    generator, models, mode = lane.generator, lane.models, lane.mode
    settings, sampling = generator.drafting(mode, 1), generator.settings.sampling
    if mode == TREE:

        @jax.jit
        def tree(models: Models, state: DecodeState, stop_ids: jax.Array) -> tuple[DecodeState, TreeRound]:
            return tree_round(models, state, stop_ids, state.sampling or sampling, settings)

        return lambda state: tree(models, state, generator.stop_ids)
    draft = jax.jit(lambda models, state: propose(models, state, state.sampling or sampling, settings)[0])

    def chain(state: DecodeState) -> tuple[DecodeState, jax.Array]:
        drafts = jax.block_until_ready(draft(models, state))  # before the round, which donates the state
        return generator.advance(models, state, mode, 1), drafts

    return chain
