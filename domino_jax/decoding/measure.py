"""Measured runs: modes side by side on the same prompts, what is kept of their answers, and whether texts are equal."""

import array
import dataclasses
import hashlib
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.generate import BASELINE, Clock, Generation, Generator, Request
from domino_jax.decoding.sampling import SamplingParams, position_noise, request_keys

# DESIGN §4: in float32 two texts may differ only where the two best values of log p + g are closer than this, or where
# a token lies this close (in probability mass) to the top-p edge.
NEAR_TIE = 1e-4
NEAR_TOP_P = 1e-5
# Divergences that a report lists; all are counted.
LISTED = 100


@dataclasses.dataclass(frozen=True)
class Lane:
    """One column of a measurement: a mode with the generator that runs it, and the drafter's name where several are.

    name tells the lanes of a measurement apart.
    """

    name: str
    mode: str
    generator: Generator
    drafter: str | None = None


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first place where two texts of one prompt differ, and why that is or is not a near tie."""

    prompt: int
    position: int  # index among the new tokens
    margin: float  # distance of the two best values of log p + g, or of a token from the edge of top-k or top-p
    near_tie: bool


@dataclasses.dataclass
class ModeRun:
    """What is kept of one mode's answers: sums, and a few numbers per answer; no text and no list of tokens.

    clock: sums over all groups.  histogram: rounds by the tokens they emitted.  digests: of the answers that differ.
    emitted, rounds: per answer, tokens emitted in rounds and how many rounds; steps: the loop's steps, plain or not.
    group_seconds, group_tokens: per group of prompts that ran together, the loop's seconds and tokens.
    compared: answers held against the baseline's (None where that was not done); the others count how that went.
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
        """Counts answers; their token ids are not kept."""
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

    def add_comparison(self, answers: int, found: Sequence[Mapping]) -> None:
        """Counts `answers` held against the baseline's, and where they differ: {"near_tie", …} each."""
        self.compared = (self.compared or 0) + answers
        self.diverged += len(found)
        self.near_ties += sum(entry["near_tie"] for entry in found)
        self.first_divergences += found[: LISTED - len(self.first_divergences)]


def add_clock(total: Clock, part: Clock) -> None:
    """Adds every figure of `part` to `total`."""
    for field in dataclasses.fields(Clock):
        setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))


def take_turns(
    lanes: Sequence[Lane], prompts: Sequence[Sequence[int]], requests: Sequence[int], turn: int
) -> dict[str, tuple[list[Generation], Clock]]:
    """The same prompts in every lane, one after another, each with its own clock; `turn` says which lane begins.

    Lanes that begin in turn are disturbed alike by a noisy machine. A lane that had to compile runs again, so that no
    rate holds a first-run cost; what it compiled stays in the clock.
    """
    done = {}
    first = turn % len(lanes)
    for lane in (*lanes[first:], *lanes[:first]):
        compiled = 0.0
        while True:
            clock = lane.generator.clock = Clock()
            answers = lane.generator.generate(prompts, lane.mode, requests)
            if not clock.compile_seconds:
                break
            compiled += clock.compile_seconds
        clock.compile_seconds = compiled
        done[lane.name] = (answers, clock)
        lane.generator.clock = Clock()  # what runs later must not add to these figures
    return {lane.name: done[lane.name] for lane in lanes}


def baseline_of(lanes: Sequence[Lane]) -> Lane | None:
    """The lane that the others are held against."""
    return next((lane for lane in lanes if lane.mode == BASELINE), None)


def accept_histogram(answers: Sequence[Generation], width: int) -> dict[str, int]:
    """Of answers, what full_histogram says."""
    return full_histogram(Counter(emitted for answer in answers for emitted in answer.accept_lengths), width)


def full_histogram(counts: Mapping[int, int], width: int) -> dict[str, int]:
    """{"1": rounds that emitted one token, … up to "width"}; {} when there was no round."""
    return {str(length): counts[length] for length in range(1, width + 1)} if counts else {}


def accept_rates(histogram: Mapping[str, int]) -> tuple[list[float], list[float | None]]:
    """(rate, conditional rate) of draft positions 1, 2, …; a conditional rate without a case is None."""
    counts = list(histogram.values())
    reached = [sum(counts[position:]) for position in range(len(counts))]  # rounds that emitted more than `position`
    plain = [kept / reached[0] for kept in reached[1:]]
    pairs = zip(reached[1:], reached, strict=False)
    return plain, [kept / before if before else None for kept, before in pairs]


def tau_pooled(generations: Sequence[Generation]) -> float:
    """τ over all rounds of all prompts: tokens emitted per target pass without the prefill's; 0 without rounds."""
    rounds = [emitted for answer in generations for emitted in answer.accept_lengths]
    return sum(rounds) / len(rounds) if rounds else 0.0


def tau_per_prompt(generations: Sequence[Generation]) -> float:
    """τ as the mean of each prompt's own mean; prompts without a round are left out."""
    means = [statistics.fmean(answer.accept_lengths) for answer in generations if answer.accept_lengths]
    return statistics.fmean(means) if means else 0.0


def divergences(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Generation],
    other: Sequence[Generation],
    requests: Sequence[int | Request] | None = None,
) -> list[Divergence]:
    """The first divergence of every prompt whose texts differ, judged by the rule of DESIGN §4.

    requests: as `generate` was given them; the prompts' indices when absent.
    """
    requests = range(len(prompts)) if requests is None else requests
    found = []
    for index, (one, two) in enumerate(zip(reference, other, strict=True)):
        if one.token_ids == two.token_ids:
            continue
        shortest = min(len(one.token_ids), len(two.token_ids))
        position = next((i for i in range(shortest) if one.token_ids[i] != two.token_ids[i]), shortest)
        if position == shortest:  # one text is a prefix of the other: a stop was missed, never a tie
            found.append(Divergence(index, position, float("inf"), False))
            continue
        prefix = [*prompts[index], *one.token_ids[:position]]
        logits = logits_after(generator, prefix)
        candidates = {one.token_ids[position], two.token_ids[position]}
        request = generator.request(requests[index])
        margin = choice_margin(logits, len(prefix), request, candidates)
        compared = [logits.max(), *logits[sorted(candidates)]]
        limit = near_tie_limit(generator.models.target.dtype, compared, request.sampling)
        found.append(Divergence(index, position, margin, margin <= limit))
    return found


def near_tie_limit(dtype: Any, compared: Sequence[float], params: SamplingParams) -> float:
    """The margin that counts as a near tie: NEAR_TIE in float32, two units in the last place in bfloat16.

    bfloat16 has 8 significant bits, so for a best logit in [16, 32) the limit is 0.25 (PITFALLS §1); like the margin it
    is divided by the temperature.

    Args:
        compared: the logits in question, the best one and those of the two choices; the largest decides. Far from the
            best, where a high temperature chooses, they may be larger than it.
    """
    if dtype == jnp.float32:
        return NEAR_TIE
    unit = 2.0 ** (np.floor(np.log2(max(1e-30, *map(abs, compared)))) - 7)
    return float(2 * unit / (params.temperature or 1.0))


def logits_after(generator: Generator, prefix: Sequence[int]) -> np.ndarray:
    """The target's logits float64 [V] after `prefix`, by one uncached pass, independent of the loop under test."""
    length = len(prefix)
    padded = np.zeros((1, generator.bucket(length)), np.int32)
    padded[0, :length] = prefix
    return np.asarray(_uncached_logits(generator.models, padded, np.int32(length - 1)), np.float64)


def choice_margin(logits: np.ndarray, position: int, request: Request, candidates: set[int]) -> float:
    """The least disturbance of `logits` under which each of `candidates` could be the choice at absolute `position`.

    A token could be chosen once it lies inside the edges and every kept token with a higher log p + g could fall
    outside them. float64 on the host.
    """
    params = request.sampling
    if params.greedy:
        return float(logits.max() - min(logits[token] for token in candidates))
    keys = request_keys(request.seed, jnp.asarray([request.noise], jnp.int32))
    noise = np.asarray(position_noise(keys, jnp.full((1, 1), position), logits.size)[0, 0], np.float64)
    scores = (logits - logits.max()) / params.temperature
    total = scores + noise
    enter, leave = edge_distances(scores, params)

    def margin(token: int) -> float:
        obstacles = np.minimum(total - total[token], leave)
        obstacles[token] = 0.0
        return max(float(enter[token]), float(obstacles.max()))

    return max(margin(token) for token in candidates)


@jax.jit
def _uncached_logits(models, tokens, place):
    """float32 [V] at one place: of a whole prefix of 4,096 tokens they would be 2.5 GB."""
    hidden = models.run_target(tokens, with_logits=False)["hidden"]
    return models.unembed(jax.lax.dynamic_slice_in_dim(hidden, place, 1, axis=1))[0, 0]


def edge_distances(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """How far each token is from entering and from leaving what top-k, top-p and min-p keep; 0 where it is there.

    scores: log p up to a constant, after temperature, float64 [V]. Distances are in log p; a distance in probability
    mass is scaled so that NEAR_TOP_P counts as NEAR_TIE.
    """
    enter, leave = np.zeros_like(scores), np.full_like(scores, np.inf)

    def edge(inside: np.ndarray, to_enter: np.ndarray, to_leave: np.ndarray) -> None:
        nonlocal enter, leave
        enter = np.maximum(enter, np.where(inside, 0.0, to_enter))
        leave = np.minimum(leave, np.where(inside, to_leave, 0.0))

    kept = scores
    if params.top_k and params.top_k < scores.size:
        descending = np.sort(scores)[::-1]
        last, next_one = descending[params.top_k - 1], descending[params.top_k]
        edge(scores >= last, last - scores, scores - next_one)
        kept = np.where(scores >= last, scores, -np.inf)
    if params.top_p < 1.0:
        p = np.exp(kept - kept.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        above = np.empty_like(p)
        above[order] = np.cumsum(p[order]) - p[order]
        mass = (above - params.top_p) * NEAR_TIE / NEAR_TOP_P
        edge(mass < 0, mass, -mass)
    if params.min_p > 0.0:
        distance = scores - (scores.max() + np.log(params.min_p))
        edge(distance >= 0, -distance, distance)
    return enter, leave
