"""From logits to the target's choice: temperature, top-k, top-p, min-p, noise by request and position (DESIGN §4).

The choice after a prefix is argmax(log p + g). It depends on prefix, seed, request and absolute position alone, never
on the drafter, the round or the batch slot; so decoding with and without speculation gives the same text.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from domino_jax.shapes import Logits


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Applied in the order of the fields."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def request_keys(seed: int, requests: jax.Array) -> jax.Array:
    """One key per request id int32 [B]: fold_in(key(seed), request); threefry, whose values vmap does not change."""
    base = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(lambda request: jax.random.fold_in(base, request))(requests)


def position_noise(keys: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise float32 [B, T, V] for the tokens to be chosen at absolute `positions` int32 [B, T]."""

    def one(key, position):
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, positions)


def process_logits(logits: Logits, params: SamplingParams) -> Logits:
    """log p up to a constant, -inf outside top-k, top-p or min-p; logits [..., V]. Greedy leaves them as they are.

    A token tied with the last one inside an edge is inside. Nothing sorts the vocabulary: top-p works on the top-k
    pool, or finds its threshold by bisection when top-k is off (a sort of 17 × 151,936 values takes 619 ms on 2 cores,
    PITFALLS §1).
    """
    logits = logits.astype(jnp.float32)
    if params.greedy:
        return logits
    pool = None
    if params.top_k:  # before the division, which keeps the order but may round two values into a tie
        pool = jax.lax.top_k(logits, min(params.top_k, logits.shape[-1]))[0]
        logits = jnp.where(logits >= pool[..., -1:], logits, -jnp.inf)
    # The maximum goes first: logits far from 0 leave no digits for the log-sum-exp, and top-p would cut elsewhere.
    top = logits.max(axis=-1, keepdims=True)
    logits = (logits - top) / params.temperature
    pool = None if pool is None else (pool - top) / params.temperature
    if params.top_p < 1.0:
        log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        threshold = _pool_threshold(pool, logits, params.top_p) if pool is not None else _threshold(log_p, params.top_p)
        logits = jnp.where((logits if pool is not None else jnp.exp(log_p)) >= threshold, logits, -jnp.inf)
    if params.min_p > 0.0:
        edge = logits.max(axis=-1, keepdims=True) + jnp.log(params.min_p)
        logits = jnp.where(logits >= edge, logits, -jnp.inf)
    return logits


def _pool_threshold(pool: jax.Array, logits: Logits, top_p: float) -> jax.Array:
    """The logit of the last token inside top-p, given the descending top-k pool [..., k] that holds all the mass."""
    p = jnp.exp(pool - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    inside = jnp.cumsum(p, axis=-1) - p < top_p
    return jnp.min(jnp.where(inside, pool, jnp.inf), axis=-1, keepdims=True)


def _threshold(log_p: Logits, top_p: float) -> jax.Array:
    """The largest t for which the tokens with p ≥ t hold at least top_p; exact, by bisection over float32 bit patterns.

    The bits of non-negative floats are ordered like the floats, so 31 halvings reach the exact value.
    """
    p = jnp.exp(log_p)

    def halve(_, bounds):
        low, high = bounds  # mass(low) >= top_p > mass(high)
        middle = low + (high - low) // 2
        t = jax.lax.bitcast_convert_type(middle, jnp.float32)
        enough = jnp.sum(jnp.where(p >= t, p, 0.0), axis=-1, keepdims=True) >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    start = jnp.zeros((*p.shape[:-1], 1), jnp.int32)
    above_one = jax.lax.bitcast_convert_type(jnp.float32(2.0), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 31, halve, (start, jnp.full_like(start, above_one)))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def choose(
    logits: Logits, keys: jax.Array, positions: jax.Array, params: SamplingParams, scale: float = 1.0
) -> jax.Array:
    """argmax(scale · log p + g), lowest id on ties: int32 [B, T] from logits [B, T, V] at positions int32 [B, T].

    scale is 1 for the target. A draft may use its own constant c: 1 couples it with the target, large c is the greedy
    draft.
    """
    values = process_logits(logits, params)
    if not params.greedy and not math.isinf(scale):
        log_p = values - jax.nn.logsumexp(values, axis=-1, keepdims=True)
        values = scale * log_p + position_noise(keys, positions, logits.shape[-1])
    return jnp.argmax(values, axis=-1).astype(jnp.int32)
