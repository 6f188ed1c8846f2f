"""Measured runs: modes side by side on the same prompts, whether their texts are equal, where a round's time goes."""

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.generate import Clock, Generation, Generator
from domino_jax.decoding.loop import DecodeState
from domino_jax.decoding.propose import DraftSettings, draft_base, roll_out_head
from domino_jax.decoding.sampling import SamplingParams, position_noise, request_keys
from domino_jax.decoding.verify import verify

# DESIGN §4: in float32 two texts may differ only where the two best values of log p + g are closer than this, or where
# a token lies this close (in probability mass) to the top-p edge.
NEAR_TIE = 1e-4
NEAR_TOP_P = 1e-5
# Turns of a timed loop: enough that one dispatch weighs nothing.
LOOPED = 16


@dataclasses.dataclass
class ModeRun:
    """All answers of one mode, in prompt order, with its own clock."""

    mode: str
    generations: list[Generation]
    clock: Clock


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first place where two texts of one prompt differ, and why that is or is not a near tie."""

    prompt: int
    position: int  # index among the new tokens
    margin: float  # distance of the two best values of log p + g, or of a token from the edge of top-k or top-p
    near_tie: bool


def decode_modes(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    modes: Sequence[str],
    on_answers: Callable[[str, int, list[Generation]], None] | None = None,
) -> dict[str, ModeRun]:
    """Every mode on every prompt, batch by batch, the modes taking turns so that a noisy machine disturbs them alike.

    The first batch of each mode and of each prompt bucket is run once before it counts, so that no rate holds a
    first-run cost. on_answers(mode, index of the first prompt, answers) is called as each batch ends.
    """
    runs = {mode: ModeRun(mode, [], Clock()) for mode in modes}
    warm: set[tuple[str, int]] = set()
    for number, start in enumerate(range(0, len(prompts), generator.batch_size)):
        batch = prompts[start : start + generator.batch_size]
        requests = list(range(start, start + len(batch)))
        bucket = generator.bucket(max(map(len, batch)))
        turn = number % len(modes)
        for mode in (*modes[turn:], *modes[:turn]):
            generator.clock = runs[mode].clock
            if (mode, bucket) not in warm:
                generator.clock = Clock()
                generator.generate(batch, mode, requests)
                runs[mode].clock.compile_seconds += generator.clock.compile_seconds
                generator.clock = runs[mode].clock
                warm.add((mode, bucket))
            answers = generator.generate(batch, mode, requests)
            runs[mode].generations += answers
            if on_answers:
                on_answers(mode, start, answers)
    generator.clock = Clock()  # what runs later must not add to these figures
    return runs


def accept_histogram(answers: Sequence[Generation], width: int) -> dict[str, int]:
    """{"1": rounds that emitted one token, … up to "width"}; {} when there was no round."""
    counts = Counter(emitted for answer in answers for emitted in answer.accept_lengths)
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
    generator: Generator, prompts: Sequence[Sequence[int]], reference: ModeRun, other: ModeRun
) -> list[Divergence]:
    """The first divergence of every prompt whose texts differ, judged by the rule of DESIGN §4."""
    found = []
    for index, (one, two) in enumerate(zip(reference.generations, other.generations, strict=True)):
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
        margin = choice_margin(generator, logits, len(prefix), index, candidates)
        found.append(Divergence(index, position, margin, margin <= near_tie_limit(generator, logits)))
    return found


def near_tie_limit(generator: Generator, logits: np.ndarray) -> float:
    """The margin that counts as a near tie: NEAR_TIE in float32, two units in the last place in bfloat16.

    bfloat16 has 8 significant bits, so for a best logit in [16, 32) the limit is 0.25 (PITFALLS §1); like the margin it
    is divided by the temperature.
    """
    if generator.models.target.dtype == jnp.float32:
        return NEAR_TIE
    unit = 2.0 ** (np.floor(np.log2(max(abs(logits.max()), 1e-30))) - 7)
    return float(2 * unit / (generator.sampling.temperature or 1.0))


def logits_after(generator: Generator, prefix: Sequence[int]) -> np.ndarray:
    """The target's logits float64 [V] after `prefix`, by one uncached pass, independent of the loop under test."""
    length = len(prefix)
    padded = np.zeros((1, generator.bucket(length)), np.int32)
    padded[0, :length] = prefix
    return np.asarray(_uncached_logits(generator.models, padded)[0, length - 1], np.float64)


def choice_margin(generator: Generator, logits: np.ndarray, position: int, request: int, candidates: set[int]) -> float:
    """The least disturbance of `logits` under which each of `candidates` could be the choice at absolute `position`.

    A token could be chosen once it lies inside the edges and every kept token with a higher log p + g could fall
    outside them. float64 on the host.
    """
    params = generator.sampling
    if params.greedy:
        return float(logits.max() - min(logits[token] for token in candidates))
    keys = request_keys(generator.seed, jnp.asarray([request], jnp.int32))
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
def _uncached_logits(models, tokens):
    return models.run_target(tokens)["logits"]


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


def round_split(generator: Generator, state: DecodeState, mode: str, repeats: int = 7) -> dict[str, float]:
    """Median seconds of one round and of its parts: draft, head, verify; "other" is the rest (accept, commit, loop).

    Each part runs LOOPED times inside one jitted loop, as it does in a generation: called alone it would copy the cache
    and pay a dispatch. What a turn computes feeds the next one, so that the compiler cannot take it out of the loop.
    """
    models = generator.models
    settings = DraftSettings(use_head=mode == "domino", scale=generator.draft_scale)
    seconds = {name: 0.0 for name in ("draft", "head", "verify")}
    for name, program in _parts(generator.sampling, settings).items():
        seconds[name] = median_seconds(jax.jit(program), (models, state), repeats) / LOOPED
    # Rows that never finish and -1 as the only stop id: the timed rounds must not end early.
    endless = jnp.full_like(state.limits, np.iinfo(np.int32).max)
    live = state.replace(done=jnp.zeros_like(state.done), limits=endless)
    arguments = (models, live, jnp.array([-1]), np.int32(LOOPED))
    whole = median_seconds(jax.jit(generator.rounds(mode)), arguments, repeats) / LOOPED
    return {**seconds, "other": max(0.0, whole - sum(seconds.values())), "round": whole}


def _parts(sampling: SamplingParams, settings: DraftSettings) -> dict[str, Callable]:
    """The parts of a round as programs (models, state) → array, each running LOOPED times."""

    def draft(models, state):
        def turn(_, carry):
            anchors, cache = carry
            _, base, cache = draft_base(models, state.replace(anchors=anchors, draft_cache=cache))
            return jnp.argmax(base[:, 0], -1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, LOOPED, turn, (state.anchors, state.draft_cache))

    def head(models, state):
        z, base, _ = draft_base(models, state)

        def turn(_, anchors):
            return roll_out_head(models, state.replace(anchors=anchors), z, base, sampling, settings)[:, -1]

        return jax.lax.fori_loop(0, LOOPED, turn, state.anchors)

    def check(models, state):
        config = models.drafter.config

        def turn(_, carry):
            tokens, cache = carry
            out = verify(models, cache, tokens, state.lengths, tap_layers=config.target_layer_ids)
            # The features are used, as a round uses them; their sum is far below a token id.
            kept = (1e-30 * out.features.sum()).astype(jnp.int32)
            return jnp.argmax(out.logits, -1).astype(jnp.int32) + kept, out.cache

        tokens = jnp.broadcast_to(state.anchors[:, None], (state.anchors.shape[0], config.num_drafts + 1))
        return jax.lax.fori_loop(0, LOOPED, turn, (tokens, state.target_cache))

    return {"draft": draft, "verify": check, **({"head": head} if settings.use_head else {})}


def straight_step_seconds(generator: Generator, state: DecodeState, repeats: int = 31) -> float:
    """Median seconds of one jitted single-token forward with cache, no loop: what an autoregressive step may cost."""

    def step(models, cache, tokens, lengths):
        out = verify(models, cache, tokens, lengths)
        return jnp.argmax(out.logits, -1), out.cache

    program = jax.jit(step, donate_argnums=1)
    cache = jax.tree.map(jnp.copy, state.target_cache)
    tokens, times = state.anchors[:, None], []
    for _ in range(repeats):
        begin = time.perf_counter()
        chosen, cache = jax.block_until_ready(program(generator.models, cache, tokens, state.lengths))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def median_seconds(program: Callable, arguments: tuple, repeats: int) -> float:
    """Median wall seconds of a jitted function over `repeats` calls, after one that compiles it."""
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
