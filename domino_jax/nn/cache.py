"""The key/value cache: a plain array per layer, an argument and a result, with its committed length kept beside it.

Rows of a block are written behind the committed length and become part of the past only when the caller advances the
length; rejecting a draft is not advancing it (DESIGN §1.8). What lies behind the length is masked, and overwritten next
round.
"""

import jax
import jax.numpy as jnp

from domino_jax.shapes import Lengths, Mask

LayerCache = tuple[jax.Array, jax.Array]  # keys and values, each [B, K, S, H]
Cache = tuple[LayerCache, ...]


def init_cache(layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype=jnp.float32) -> Cache:
    """Zeros: `layers` pairs of [B, K, S, H]."""
    shape = (batch, kv_heads, slots, head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def grow(cache: Cache, slots: int) -> Cache:
    """The same rows with room for `slots` positions; the new ones are zeros."""

    def pad(array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, 0), (0, 0), (0, slots - array.shape[2]), (0, 0)))

    return tuple((pad(k), pad(v)) for k, v in cache)


def append(cache: LayerCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerCache:
    """Writes k, v [B, K, T, H] at `slots` int32 [B, T].

    One scatter that drops what lies outside: dynamic_update_slice would clamp the start and overwrite committed rows.
    """
    rows = jnp.arange(slots.shape[0])[:, None]

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[rows, :, slots].set(new.swapaxes(1, 2).astype(old.dtype), mode="drop")

    return write(cache[0], k), write(cache[1], v)


def block_mask(lengths: Lengths, ancestors: jax.Array, slots: int) -> Mask:
    """bool [B, T, S] for a block of T rows written at slots length..length+T-1.

    Row t reads every committed slot (s < length) and block row u iff ancestors[t, u] (bool [T, T] or [B, T, T]).

    >>> length 2, chain of 3, 6 slots  →  1 1 1 0 0 0
                                          1 1 1 1 0 0
                                          1 1 1 1 1 0
    """
    size = ancestors.shape[-1]
    ancestors = jnp.broadcast_to(ancestors, (lengths.shape[0], size, size))
    offset = jnp.arange(slots)[None, :] - lengths[:, None]  # [B, S], 0 at the block's first row
    inside = (offset >= 0) & (offset < size)
    column = jnp.clip(offset, 0, size - 1)
    in_block = jnp.take_along_axis(ancestors, column[:, None, :], axis=2)
    return (offset < 0)[:, None, :] | (inside[:, None, :] & in_block)
