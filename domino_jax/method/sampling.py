"""From logits to the target's choice: temperature, top-k, top-p, min-p, then noise (docs/method.md).

The choice after a prefix is argmax(log p + g). It depends on prefix, seed, request and absolute position alone, never
on the drafter, the round or the batch slot; so decoding with and without speculation gives the same text.
"""

import math
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.method.settings import SamplingKind, SamplingParams
from domino_jax.models.shapes import Logits


@flax.struct.dataclass
class RowSampling:
    """The SamplingParams of every row of a batch, for requests that differ; arrays [B].

    first_stop: the first absolute position that a stop id may have, 0 for any.  kind: static; programs differ by it.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    first_stop: jax.Array
    kind: SamplingKind = flax.struct.field(pytree_node=False)

    @classmethod
    def of(
        cls, rows: Sequence[SamplingParams], kind: SamplingKind | None = None, first_stop: np.ndarray | None = None
    ) -> "RowSampling":
        """One row for each of `rows`; kind: of all params that the program has to serve, of `rows` when None."""
        dtypes = (np.float32, np.int32, np.float32, np.float32)
        columns = zip(*(row.columns() for row in rows), strict=True)
        columns = [np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]
        first_stop = np.zeros(len(rows), np.int32) if first_stop is None else first_stop
        return cls(*columns, first_stop, kind=kind or SamplingKind.of(rows))

    def columns(self) -> tuple:
        return tuple(column[:, None, None] for column in (self.temperature, self.top_k, self.top_p, self.min_p))


Sampling = SamplingParams | RowSampling
CHUNK = 128  # tokens of a vocabulary that are looked at by their largest first; a TPU's lanes


def request_keys(seeds: int | jax.Array, requests: jax.Array) -> jax.Array:
    """One key per request id int32 [B]: fold_in(key(seed), request); threefry, whose values vmap does not change.

    seeds: one for all, or one for each row, int32 [B].
    """
    seeds = jnp.broadcast_to(jnp.asarray(seeds, jnp.int32), requests.shape)

    def key_of(seed, request):
        return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), request)

    return jax.vmap(key_of)(seeds, requests)


def position_noise(keys: jax.Array, positions: jax.Array, vocab: int) -> jax.Array:
    """Standard Gumbel noise float32 [B, T, V] for the tokens to be chosen at absolute `positions` int32 [B, T]."""

    def draw(key, position):
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab,), jnp.float32)

    return jax.vmap(jax.vmap(draw, in_axes=(None, 0)))(keys, positions)


def process_logits(logits: Logits, params: Sampling) -> Logits:
    """log p up to a constant, -inf outside top-k, top-p or min-p; logits [B, T, V]. Greedy leaves them as they are.

    A token tied with the last one inside an edge is inside. Nothing sorts the vocabulary (17 × 151,936 values take
    619 ms on 2 cores): top-p works on the top-k pool, or finds its threshold by bisection when top-k is off.
    """
    logits = logits.astype(jnp.float32)
    kind = params.kind
    if kind.greedy:
        return logits
    unchanged = logits
    temperature, top_k, top_p, min_p = params.columns()
    top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)  # devices take a smaller one for 0, and no token is inside
    divisor = divisor_of(params)  # of a greedy row among others too, whose result is discarded below
    if kind.pool:  # before the division, which keeps the order but may round two values into a tie
        pool, last = _top_k(logits, kind.pool, top_k)
        logits = jnp.where(logits >= last, logits, -jnp.inf)
        pool = jnp.where(pool >= last, pool, -jnp.inf)
    # The maximum goes first: logits far from 0 leave no digits for the log-sum-exp, and top-p would cut elsewhere.
    top = logits.max(axis=-1, keepdims=True)
    logits = (logits - top) / divisor
    if kind.searched:
        log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        edge = jnp.where(top_p < 1.0, _threshold(log_p, top_p), 0.0)
        logits = jnp.where(jnp.exp(log_p) >= edge, logits, -jnp.inf)
    elif kind.nucleus:
        edge = jnp.where(top_p < 1.0, _pool_threshold((pool - top) / divisor, logits, top_p), -jnp.inf)
        logits = jnp.where(logits >= edge, logits, -jnp.inf)
    logits = jnp.where(logits >= jnp.log(min_p), logits, -jnp.inf)  # the largest is 0
    return jnp.where(temperature > 0, logits, unchanged)


def divisor_of(params: Sampling) -> jax.Array:
    """The temperature, 1 where that is 0. Devices take the inverse of an extreme one for 0 or infinity."""
    temperature = jnp.asarray(params.columns()[0], jnp.float32)
    return jnp.where(temperature > 0, jnp.clip(temperature, 1e-30, 1e30), 1.0)


def _top_k(logits: Logits, pool: int, top_k: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """The `pool` largest logits, descending, and each row's top_k-th of them; -inf where a row's top_k is off."""
    values = largest(logits, min(pool, logits.shape[-1]))[0]
    place = jnp.broadcast_to(jnp.clip(jnp.asarray(top_k) - 1, 0, values.shape[-1] - 1), (*values.shape[:-1], 1))
    return values, jnp.where(jnp.asarray(top_k) > 0, jnp.take_along_axis(values, place, axis=-1), -jnp.inf)


def largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """jax.lax.top_k of values [..., V], without sorting a vocabulary, as compilers for TPUs and GPUs would.

    The `count` chunks with the largest maxima hold them all: a value elsewhere is less, or equal and later.
    """
    chunks = -(-values.shape[-1] // CHUNK)
    if chunks <= 2 * count:
        return jax.lax.top_k(values, count)
    # Without the barrier the compiler for TPUs cuts the lm_head into chunks instead, and copies it for that in a round.
    values = jax.lax.optimization_barrier(values)
    widths = [(0, 0)] * (values.ndim - 1) + [(0, chunks * CHUNK - values.shape[-1])]
    parts = jnp.pad(values, widths, constant_values=-jnp.inf).reshape(*values.shape[:-1], chunks, CHUNK)
    best = jnp.sort(jax.lax.top_k(parts.max(axis=-1), count)[1], axis=-1)  # in their order, for ties
    # Without the barrier XLA:CPU computes them again for the gather: 16 rows of 49,152 took 7.4 ms instead of 1.2, and
    # top_k 1.5 (of 151,936: 1.8 and 21).
    best = jax.lax.optimization_barrier(best)
    few = jnp.take_along_axis(parts, best[..., None], axis=-2).reshape(*values.shape[:-1], count * CHUNK)
    top, places = jax.lax.top_k(few, count)
    return top, jnp.take_along_axis(best, places // CHUNK, axis=-1) * CHUNK + places % CHUNK


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
    logits: Logits,
    keys: jax.Array,
    positions: jax.Array,
    params: Sampling,
    depths: jax.Array | None = None,
    stop_ids: jax.Array | None = None,
) -> jax.Array:
    """The target's choice argmax(log p + g), int32 [B, T], from logits [B, T, V] at positions int32 [B, T].

    Args:
        depths: int32 [B, T] for the nodes of a tree: node t has position positions[depths[t]], and nodes of one depth
            share one row of noise; positions are then [B, M+1].
        stop_ids: int32 [S], none of which is chosen before a row's first_stop, for params that are `delayed`.
    """
    if params.kind.delayed:
        early = positions < params.first_stop[:, None]
        early = early if depths is None else jnp.take_along_axis(early, depths, axis=1)
        is_stop = (jnp.arange(logits.shape[-1])[:, None] == stop_ids).any(-1)
        logits = jnp.where(early[:, :, None] & is_stop, -jnp.inf, logits)
    if params.kind.greedy:
        return choose_with(logits, None, params)
    noise = position_noise(keys, positions, logits.shape[-1])
    if depths is not None:
        noise = jnp.take_along_axis(noise, depths[:, :, None], axis=1)
    return choose_with(logits, noise, params)


def reads_noise(params: Sampling, sharpness: float) -> bool:
    """Whether a draft of this draft_sharpness depends on the noise.

    An infinite one gives the argmax of the logits, which temperature, top-k, top-p and min-p never change.
    """
    return not (params.kind.greedy or math.isinf(sharpness))


def choose_with(logits: Logits, noise: jax.Array | None, params: Sampling, sharpness: float = 1.0) -> jax.Array:
    """The place of the best of Q logits [B, T, Q] by sharpness · log p + g, the first on ties: int32 [B, T].

    noise: g, float32 [B, T, Q]; None where the choice reads none.  sharpness: draft_sharpness for a draft.
    """
    return _best(choice_values(logits, noise, params, sharpness))


def choice_values(logits: Logits, noise: jax.Array | None, params: Sampling, sharpness: float = 1.0) -> jax.Array:
    """The values of which `choose_with` takes the best: sharpness · log p + g up to a constant, float32 [B, T, Q]."""
    if noise is None:
        return logits
    log_p = process_logits(logits, params)  # up to a constant, which changes no choice
    return jnp.where(params.columns()[0] > 0, sharpness * log_p + noise, log_p)


def _best(values: jax.Array) -> jax.Array:
    """jnp.argmax of values [..., Q], int32 [...].

    XLA:CPU runs argmax element by element, and all that is fused into it. For 5 rows of 49,152 on one core two plain
    reductions take 0.14 ms instead of 1.1, and with the noise 1.2 instead of 5.1.
    """

    def two_reductions(values):
        values = jax.lax.optimization_barrier(values)  # or each reduction computes the noise again
        places = jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
        below = values < values.max(axis=-1, keepdims=True)  # never true of NaN, so the result is always a place
        return jnp.where(below, values.shape[-1], places).min(axis=-1)

    return jax.lax.platform_dependent(
        values, cpu=two_reductions, default=lambda values: jnp.argmax(values, axis=-1).astype(jnp.int32)
    )
