"""Attention over a long cache as one Pallas kernel for NVIDIA GPUs, which keeps the scores in registers.

As in flash decoding, several programs share the slots of one head, because a few requests have too few heads for all
multiprocessors; their results are combined afterwards.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from domino_jax.models.long_attention import heads_per_chip, product, rows_of, scores_per_chip, supported, visible
from domino_jax.models.shapes import MASKED

# Up to this many scores, 25 MB in float32, stay in the second-level cache of an H100 or H200 in programs without the
# kernel.
FEW_SCORES = 25 * 2**18
# An H100 or H200 has 132 multiprocessors. By estimate two programs for each keep its memory busy, and with fewer than
# FEWEST_PROGRAMS in all XLA's form is faster.
PROGRAMS, FEWEST_PROGRAMS = 256, 64
# Slots of a program, at least, where several share a head: its result then has at most a quarter of the bytes of its
# keys and values.
FEWEST_SLOTS = 512
STEP = 64  # slots that a program processes at a time
FEWEST_ROWS, MOST_ROWS = 16, 128  # of a tile, and of a head; powers of two
WIDTHS = (64, 128)  # of a head


def applies(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel supports q [B, N, T, H] over k [B, K, S, H] and is worth using."""
    if not supported(q, k) or q.shape[3] not in WIDTHS or rows_of(q, k) > MOST_ROWS or k.shape[2] % STEP:
        return False
    heads = heads_per_chip(k)
    return scores_per_chip(q, k) > FEW_SCORES and heads * part_count(heads, k.shape[2]) >= FEWEST_PROGRAMS


def part_count(heads: int, slots: int) -> int:
    """Programs that share the slots of a head: a power of two, so that there are at most PROGRAMS in all and each has
    FEWEST_SLOTS slots or more; one program for a shorter cache.

    Args:
        heads: of all requests.
    """
    most = max(1, min(PROGRAMS // heads, slots // FEWEST_SLOTS))
    return 1 << most.bit_length() - 1


def row_tiles(rows: int) -> list[tuple[int, int]]:
    """(first row, size) of the tiles of a head's rows. Sizes are powers of two, as the kernel needs them; together they
    exceed the rows by as few as possible.

    >>> 68 rows  →  (0, 64), (64, 16)        9  →  (0, 16)
    """
    largest = max(FEWEST_ROWS, 1 << rows.bit_length() - 1)
    rest = rows - largest
    return [(0, largest)] + ([(largest, max(FEWEST_ROWS, 1 << (rest - 1).bit_length()))] if rest > 0 else [])


def kernel_call(q: jax.Array, k: jax.Array, v: jax.Array, words: jax.Array, length: int, interpret: bool) -> jax.Array:
    """A long_attention.KernelCall. The programs of a head run at the same time; a second kernel joins their results.

    Slots after the last one that a row of the request reads are not loaded; the programs share the others evenly.
    """
    batch, heads, rows, width = q.shape
    slots, count = k.shape[2], words.shape[1]
    parts, tiles = part_count(batch * heads, slots), row_tiles(rows)
    padded = sum(size for _, size in tiles)  # blocks reach beyond the arrays there, and no program touches that
    steps = jnp.where((words != 0).any(axis=1), jnp.arange(slots) // STEP + 1, 0).max(axis=1, keepdims=True)
    of_head = pl.BlockSpec((None, None, slots, width), lambda b, h, p: (b, h, 0, 0))
    shapes = [(batch, heads, parts, rows, width), *2 * [(batch, heads, parts, rows)]]
    sums, tops, totals = pl.pallas_call(
        functools.partial(_kernel, length=length, rows=rows, tiles=tiles),
        grid=(batch, heads, parts),
        in_specs=[
            pl.BlockSpec((None, None, padded, width), lambda b, h, p: (b, h, 0, 0)),
            of_head,
            of_head,
            pl.BlockSpec((None, count, slots), lambda b, h, p: (b, 0, 0)),
            pl.BlockSpec((None, 1), lambda b, h, p: (b, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, padded, width), lambda b, h, p: (b, h, p, 0, 0)),
            *2 * [pl.BlockSpec((None, None, None, padded), lambda b, h, p: (b, h, p, 0))],
        ],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        compiler_params=triton.CompilerParams(num_warps=8 if tiles[0][1] == MOST_ROWS else 4, num_stages=2),
        interpret=interpret,
    )(q, k, v, words, steps)
    of_row = pl.BlockSpec((None, None, parts, None), lambda b, h, r: (b, h, 0, r))
    return pl.pallas_call(
        _join,
        grid=(batch, heads, rows),
        in_specs=[pl.BlockSpec((None, None, parts, None, width), lambda b, h, r: (b, h, 0, r, 0)), of_row, of_row],
        out_specs=pl.BlockSpec((None, None, None, width), lambda b, h, r: (b, h, r, 0)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
    )(sums, tops, totals)


def _kernel(
    q_ref, k_ref, v_ref, words_ref, steps_ref, sums_ref, tops_ref, totals_ref, *, length: int, rows: int, tiles
):
    """A share of the slots of one head of one request: weighted sums of values, row maxima, sums of weights."""
    part, parts, width = pl.program_id(2), pl.num_programs(2), q_ref.shape[1]
    places = [(pl.ds(first, size), first + jnp.arange(size) < rows) for first, size in tiles]
    wide = [jnp.broadcast_to(there[:, None], (len(there), width)) for _, there in places]
    queries = [triton.load(q_ref.at[here, :], mask=mask, other=0) for (here, _), mask in zip(places, wide, strict=True)]

    def step(index, carry):
        here = pl.ds(index * STEP, STEP)
        keys, values = k_ref[here, :], v_ref[here, :]
        words = [words_ref[word, here][None] for word in range(words_ref.shape[0])]
        after = []
        for (first, size), q, (top_before, total, sums) in zip(tiles, queries, carry, strict=True):
            scores = product(q, keys, 1) * width**-0.5
            scores = jnp.where(visible(words, size, length, first), scores, MASKED)
            top = jnp.maximum(top_before, scores.max(axis=1))
            weights, fade = jnp.exp(scores - top[:, None]), jnp.exp(top_before - top)
            sums = sums * fade[:, None] + product(weights.astype(values.dtype), values, 0)
            after.append((top, total * fade + weights.sum(axis=1), sums))
        return tuple(after)

    start = [(jnp.full(size, MASKED, jnp.float32), jnp.zeros(size), jnp.zeros((size, width))) for _, size in tiles]
    steps = steps_ref[0]
    results = jax.lax.fori_loop(part * steps // parts, (part + 1) * steps // parts, step, tuple(start))
    for (here, there), mask, (top, total, sums) in zip(places, wide, results, strict=True):
        triton.store(sums_ref.at[here, :], sums, mask=mask)
        triton.store(tops_ref.at[here], top, mask=there)
        triton.store(totals_ref.at[here], total, mask=there)


def _join(sums_ref, tops_ref, totals_ref, out_ref):
    """One row's results of all programs of its head. One that saw nothing for the row fades to nothing."""
    tops = tops_ref[...]
    top = tops.max(axis=0)
    fade = jnp.exp(tops - top)
    out = (sums_ref[...] * fade[:, None]).sum(axis=0) / (totals_ref[...] * fade).sum(axis=0)
    out_ref[...] = jnp.where(top > MASKED, out, 0.0).astype(out_ref.dtype)
