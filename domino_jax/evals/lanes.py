"""Lanes: modes and drafters that answer the same prompts alternately, and the figures of their answers."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from domino_jax.decoding.generate import Clock, Generation, Generator
from domino_jax.decoding.settings import BASELINE
from domino_jax.method.pair import Pair

# Divergences that a report lists; all are counted.
LISTED = 100


@dataclasses.dataclass(frozen=True)
class Lane:
    """A mode with the models and the generator that run it.  drafter: its name where there are several."""

    name: str
    mode: str
    models: Pair
    generator: Generator
    drafter: str | None = None


@dataclasses.dataclass
class ModeRun:
    """Figures of one mode's answers: sums, and a few numbers per answer; no text and no list of tokens.

    clock: sums over all groups.  histogram: rounds by the tokens they emitted.
    emitted, rounds: per answer, tokens emitted in rounds and how many rounds.
    group_seconds, group_tokens: per group of prompts that ran together, the loop's seconds and tokens.
    compared: answers compared with the baseline's (None where that was not done); diverged, near_ties: how many differ.
    """

    clock: Clock = dataclasses.field(default_factory=Clock)
    tokens: int = 0
    stopped: int = 0
    histogram: Counter = dataclasses.field(default_factory=Counter)
    emitted: list[int] = dataclasses.field(default_factory=list)
    rounds: list[int] = dataclasses.field(default_factory=list)
    group_seconds: list[float] = dataclasses.field(default_factory=list)
    group_tokens: list[int] = dataclasses.field(default_factory=list)
    compared: int | None = None
    diverged: int = 0
    near_ties: int = 0
    first_divergences: list[Mapping] = dataclasses.field(default_factory=list)

    @property
    def answers(self) -> int:
        return len(self.rounds)

    def add(self, answers: Sequence[Generation]) -> None:
        for answer in answers:
            self.tokens += len(answer.token_ids)
            self.stopped += answer.finish_reason == "stop"
            self.histogram.update(answer.accept_lengths)
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
