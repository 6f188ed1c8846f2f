"""Whether two texts of one prompt differ only at near ties (docs/method.md)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.generate import Generation, Generator
from domino_jax.decoding.requests import Request
from domino_jax.method.pair import Pair
from domino_jax.method.sampling import position_noise, request_keys
from domino_jax.method.settings import SamplingParams

# In float32 two texts may differ only where the two best values of log p + g are closer than NEAR_TIE, or where a
# token is within NEAR_TOP_P of probability mass of the top-p edge.
NEAR_TIE = 1e-4
NEAR_TOP_P = 1e-5


class Divergence(NamedTuple):
    """The first place where two texts of one prompt differ, and why that is or is not a near tie."""

    prompt: int
    position: int  # index among the new tokens
    # Distance of the two best values of log p + g, or of a token from an edge of top-k or top-p. None: a text was cut.
    margin: float | None
    near_tie: bool


def divergences(
    models: Pair,
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    reference: Sequence[Generation],
    other: Sequence[Generation],
    requests: Sequence[int | Request] | None = None,
) -> list[Divergence]:
    """The first divergence of every prompt whose texts differ, judged by the rule above. requests: of `generate`."""
    requests = range(len(prompts)) if requests is None else requests
    diverged = []
    for index, answers in enumerate(zip(reference, other, strict=True)):
        first, second = (answer.token_ids for answer in answers)
        if first == second:
            continue
        shortest = min(len(first), len(second))
        position = next((i for i in range(shortest) if first[i] != second[i]), shortest)
        if position == shortest:  # one text is a prefix of the other: a stop was missed, never a tie
            diverged.append(Divergence(index, position, None, False))
            continue
        prefix = [*prompts[index], *first[:position]]
        padded = np.zeros((1, generator.bucket(len(prefix))), np.int32)
        padded[0, : len(prefix)] = prefix
        logits = np.asarray(_uncached_logits(models, padded, np.int32(len(prefix) - 1)), np.float64)
        candidates = {first[position], second[position]}
        request = generator.request(requests[index])
        margin = choice_margin(logits, len(prefix), request, candidates)
        compared = [logits.max(), *logits[sorted(candidates)]]
        limit = near_tie_limit(models.target.dtype, compared, request.sampling)
        diverged.append(Divergence(index, position, margin, margin <= limit))
    return diverged


@jax.jit
def _uncached_logits(models, tokens, place):
    """float32 [V] after one place of tokens [1, T], by one pass without a cache and without the loop.

    Those of a whole prefix of 4,096 tokens would be 2.5 GB.
    """
    hidden = models.run_target(tokens, with_logits=False)["hidden"]
    return models.unembed(jax.lax.dynamic_slice_in_dim(hidden, place, 1, axis=1))[0, 0]


def near_tie_limit(dtype: Any, compared: Sequence[float], params: SamplingParams) -> float:
    """The margin that counts as a near tie: NEAR_TIE in float32, two units in the last place in bfloat16.

    bfloat16 has 8 significant bits, so for a best logit in [16, 32) the limit is 0.25; like the margin it is
    divided by the temperature.

    compared: the best logit and the logits of the two choices; the largest magnitude decides.
    """
    if dtype == jnp.float32:
        return NEAR_TIE
    unit = 2.0 ** (np.floor(np.log2(max(1e-30, *map(abs, compared)))) - 7)
    return float(2 * unit / (params.temperature or 1.0))


def choice_margin(logits: np.ndarray, position: int, request: Request, candidates: set[int]) -> float:
    """The least disturbance of `logits` under which each of `candidates` could be the choice at absolute `position`.

    A token could be chosen when it is inside the edges and every kept token with a higher log p + g could fall outside
    them. float64 on the host.
    """
    params = request.sampling
    if params.greedy:
        return float(logits.max() - min(logits[token] for token in candidates))
    keys = request_keys(request.seed, jnp.asarray([request.noise], jnp.int32))
    scores = (logits - logits.max()) / params.temperature
    total = scores + np.asarray(position_noise(keys, jnp.full((1, 1), position), logits.size)[0, 0], np.float64)
    enter, leave = edge_distances(scores, params)

    def margin(token: int) -> float:
        obstacles = np.minimum(total - total[token], leave)
        obstacles[token] = 0.0
        return max(float(enter[token]), float(obstacles.max()))

    return max(margin(token) for token in candidates)


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

    inside = scores
    if params.top_k and params.top_k < scores.size:
        descending = np.sort(scores)[::-1]
        last, next_one = descending[params.top_k - 1], descending[params.top_k]
        edge(scores >= last, last - scores, scores - next_one)
        inside = np.where(scores >= last, scores, -np.inf)
    if params.top_p < 1.0:
        p = np.exp(inside - inside.max())
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
