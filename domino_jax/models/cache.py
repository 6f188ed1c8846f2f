"""The key/value cache: a plain array per layer, an argument and a result, with its committed length beside it.

Rows of a block are written after the committed length. They become part of the past only when the caller advances the
length, so rejecting a draft is not advancing it. Rows after the length are masked, and overwritten in the next round.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from domino_jax.models.layers import apart_on_gpus
from domino_jax.models.shapes import Lengths, Mask

LayerCache = tuple[jax.Array, jax.Array]  # keys and values, each [B, K, S, H]
Cache = tuple[LayerCache, ...]


def init_cache(layers: int, batch: int, slots: int, kv_heads: int, head_dim: int, dtype=jnp.float32) -> Cache:
    """Zeros: `layers` pairs of [B, K, S, H]."""
    shape = (batch, kv_heads, slots, head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(layers))


def slots_of(cache: Cache) -> int:
    """S, the same for all layers."""
    return cache[0][0].shape[2]


def resize(caches: Any, slots: int) -> Any:
    """The caches [B, K, S, H] of a tree with `slots` slots: zeros after the rows they have, or only the first ones of
    these. Arrays with another number of axes stay as they are.
    """

    def resize_rows(rows: jax.Array) -> jax.Array:
        if rows.ndim != 4:
            return rows
        added = [(0, slots - rows.shape[2] if axis == 2 else 0, 0) for axis in range(4)]
        return jax.lax.pad(rows, jnp.zeros((), rows.dtype), added)

    return jax.tree.map(resize_rows, caches)


def append(cache: LayerCache, k: jax.Array, v: jax.Array, slots: jax.Array) -> LayerCache:
    """Writes k, v [B, K, T, H] at `slots` int32 [B, T], which are consecutive: slots[:, 0] and the T - 1 after it.

    A row whose block would not fit whole is left as it is: dynamic_update_slice alone would clamp the start and
    overwrite committed rows. One window a row, and not one slot at a time: TPU compilers copy the whole cache into
    another layout and back for a scatter of single slots (12 % of all bytes of a 17-row pass of Qwen3-8B).

    A block of one is written as two, the second row zeros and never committed: XLA:CPU makes a single one twice, for
    the attention and for the result, and then copies the whole cache five times (1.5 → 0.5 ms for 24 layers × 128 wide,
    384 slots).
    """
    if k.shape[2] == 1:
        k, v = (jnp.pad(rows, ((0, 0), (0, 0), (0, 1), (0, 0))) for rows in (k, v))
    starts = slots[:, :1]

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(old.dtype)
        if old.shape[0] > 1:
            return write_rows(old, new, starts)
        return jax.lax.platform_dependent(old, new, starts, cuda=write_single_row, default=write_rows)

    if len(slots) == 1:
        # Otherwise the compiler for GPUs fuses the norm of the keys with the choice between old and new rows, which
        # costs one more kernel.
        k = apart_on_gpus(k)
    return write(cache[0], k), write(cache[1], v)


def write_rows(old: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
    """old [B, K, S, H] with new [B, K, T, H] from the slots `starts` int32 [B, 1] on, in the rows where all T fit."""
    # With the batch as a batching dimension each row is written on its own device. With the row as an index, a mesh
    # would gather the new rows of all devices.
    windows = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3),
        inserted_window_dims=(),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter(
        old,
        starts,
        new,
        windows,
        indices_are_sorted=True,
        unique_indices=True,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )


def write_single_row(old: jax.Array, new: jax.Array, starts: jax.Array) -> jax.Array:
    """`write_rows` for one row, which the compiler for GPUs makes one kernel of; of a scatter it makes two or three.

    Both slices are clamped alike, so a block that does not fit writes back what is there.
    """
    start, size = starts[0, 0], new.shape[2]
    there = jax.lax.dynamic_slice_in_dim(old, start, size, axis=2)
    new = jnp.where(start <= old.shape[2] - size, new, there)
    return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=2)


def keep_path(cache: Cache, lengths: Lengths, path: jax.Array, size: int) -> Cache:
    """Copies the rows at length + path[k] to length + k, for k = 0, 1, …; path int32 [B, T], places in the block.

    A tree commits the rows of its accepted path so. They have the positions of the path already.

    size: rows of the block.
    """
    slots = lengths[:, None] + jnp.arange(path.shape[1])

    def taken(rows: jax.Array) -> jax.Array:
        windowed = functools.partial(take_by_product, size=size)
        return jax.lax.platform_dependent(rows, lengths, path, tpu=windowed, default=take_by_gather)

    def move(layer: LayerCache) -> LayerCache:
        return append(layer, *(taken(rows) for rows in layer), slots)

    return tuple(move(layer) for layer in cache)


def take_by_gather(rows: jax.Array, lengths: Lengths, path: jax.Array) -> jax.Array:
    """rows [B, K, S, H] at slots length + path[k] → [B, K, T, H]; slots after the last are the last.

    A finished row may have no room for a block. The values that are taken for it are not used, but they must be finite,
    because attention of the next text in that row multiplies them by zero.
    """
    return jnp.take_along_axis(rows, (lengths[:, None] + path)[:, None, :, None], axis=2, mode="clip")


def take_by_product(rows: jax.Array, lengths: Lengths, path: jax.Array, size: int) -> jax.Array:
    """As take_by_gather: the block of `size` rows as one window, and of it the path by a product with zeros and ones.

    To gather slots, TPU compilers copy every cache into another layout and back: on one v5p a round of Qwen3-8B with 64
    nodes moved 29.0 GB, and moves 23.6 GB this way. A GPU reads no less this way, with twice the kernels.
    """
    window = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size, axis=1))(rows, lengths)
    picks = (path[:, :, None] == jnp.arange(size)).astype(rows.dtype)
    # In full precision: the rows must be what they were, to the last bit.
    exact = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": rows.dtype}
    return jnp.einsum("bpt,bkth->bkph", picks, window, **exact)


def block_mask(lengths: Lengths, ancestors: jax.Array, slots: int, window: int | None = None) -> Mask:
    """bool [B, T, S] for a block of T rows written at positions length..length+T-1.

    Row t reads every committed row (position < length) and block row u iff ancestors[t, u] (bool [T, T] or [B, T, T]).

    Args:
        window: row t reads committed rows from length + t - (window - 1) on.

    >>> length 2, chain of 3, 6 slots  →  1 1 1 0 0 0
                                          1 1 1 1 0 0
                                          1 1 1 1 1 0
    """
    size = ancestors.shape[-1]
    ancestors = jnp.broadcast_to(ancestors, (lengths.shape[0], size, size))
    position = jnp.arange(slots)
    offset = position - lengths[:, None]  # [B, S], 0 at the block's first row
    committed = (offset < 0)[:, None, :]
    if window:
        committed &= offset[:, None, :] > jnp.arange(size)[:, None] - window
    inside = (offset >= 0) & (offset < size)
    column = jnp.clip(offset, 0, size - 1)
    in_block = jnp.take_along_axis(ancestors, column[:, None, :], axis=2)
    return committed | (inside[:, None, :] & in_block)
