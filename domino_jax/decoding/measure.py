"""Measured runs: modes side by side on the same prompts, whether their texts are equal, where a round's time goes."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

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
    return runs


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
        margin = choice_margin(generator, prefix, index, {one.token_ids[position], two.token_ids[position]})
        found.append(Divergence(index, position, margin, margin < NEAR_TIE))
    return found


def choice_margin(generator: Generator, prefix: Sequence[int], request: int, candidates: set[int]) -> float:
    """How far the choice after `prefix` is from going to another of `candidates`; see Divergence.margin.

    One uncached pass over the prefix, then float64 on the host, independent of the loop under test. A distance from the
    top-p edge is scaled so that NEAR_TOP_P of mass counts as NEAR_TIE.
    """
    length = len(prefix)
    padded = np.zeros((1, generator.bucket(length)), np.int32)
    padded[0, :length] = prefix
    models, params = generator.models, generator.sampling
    logits = np.asarray(_uncached_logits(models, padded)[0, length - 1], np.float64)
    if params.greedy:
        values = np.sort(logits[list(candidates)])
        return float(logits.max() - values[0])
    keys = request_keys(generator.seed, jnp.asarray([request], jnp.int32))
    noise = np.asarray(position_noise(keys, jnp.full((1, 1), length), logits.size)[0, 0], np.float64)
    scores = logits / params.temperature
    total = scores + noise
    order = np.sort(total[list(candidates)])
    return float(min(order[-1] - order[0], _edge_distance(scores, params, candidates)))


@jax.jit
def _uncached_logits(models, tokens):
    return models.run_target(tokens)["logits"]


def _edge_distance(scores: np.ndarray, params: SamplingParams, candidates: set[int]) -> float:
    """A candidate's least distance from the edge of top-k, top-p or min-p, in units of NEAR_TIE's limit."""
    distances = [float("inf")]
    kept = scores
    if params.top_k:
        edge = np.sort(scores)[-min(params.top_k, scores.size)]
        distances += [abs(scores[token] - edge) for token in candidates]
        kept = np.where(scores >= edge - NEAR_TIE, scores, -np.inf)
    if params.top_p < 1.0:
        p = np.exp(kept - kept.max())
        p /= p.sum()
        for token in candidates:
            above = p[p > p[token]].sum()
            distances.append(abs(above - params.top_p) * NEAR_TIE / NEAR_TOP_P)
    if params.min_p > 0.0:
        edge = scores.max() + np.log(params.min_p)
        distances += [abs(scores[token] - edge) for token in candidates]
    return min(distances)


def round_split(generator: Generator, state: DecodeState, mode: str, repeats: int = 15) -> dict[str, float]:
    """Median seconds of one round's parts, each a jitted function of its own: draft, head, verify, and the whole round.

    The parts run on a copy of `state`; "other" is the whole round less the parts, at least 0 (accept, commit, loop).
    """
    models, sampling = generator.models, generator.sampling
    settings = DraftSettings(use_head=mode == "domino", scale=generator.draft_scale)
    z, base, _ = jax.jit(draft_base)(models, state)
    tokens = jnp.zeros((state.anchors.shape[0], generator.block_rows()), jnp.int32)
    taps = models.drafter.config.target_layer_ids

    def head(models, state, z, base):
        return roll_out_head(models, state, z, base, sampling, settings)

    def check(models, cache, tokens, lengths):
        out = verify(models, cache, tokens, lengths, tap_layers=taps)
        return out.logits, out.features

    seconds = {
        "draft": median_seconds(jax.jit(lambda m, s: draft_base(m, s)[:2]), (models, state), repeats),
        "head": median_seconds(jax.jit(head), (models, state, z, base), repeats) if settings.use_head else 0.0,
        "verify": median_seconds(jax.jit(check), (models, state.target_cache, tokens, state.lengths), repeats),
    }
    live = state.replace(done=jnp.zeros_like(state.done), limits=jnp.full_like(state.limits, np.iinfo(np.int32).max))
    rounds = 16
    many = jax.jit(generator.rounds(mode))
    # -1 as the only stop id: the timed rounds must not end early.
    whole = median_seconds(many, (models, live, jnp.array([-1]), np.int32(rounds)), max(3, repeats // 3)) / rounds
    seconds["other"] = max(0.0, whole - sum(seconds.values()))
    return {**seconds, "round": whole}


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
