"""Attention over a long cache as one Pallas kernel for NVIDIA GPUs, which keeps the scores in registers.

As in flash decoding, several programs share the slots of one head, because a few requests have too few heads for all
multiprocessors; their results are combined afterwards.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from domino_jax.models.long_attention import (
    heads_per_chip,
    product,
    rows_of,
    scores_per_chip,
    supported,
    visible,
)
from domino_jax.models.shapes import MASKED

# Up to this many scores, 25 MB in float32, stay in the second-level cache of an H100 or H200 in programs without the
# kernel.
FEW_SCORES = 25 * 2**18
# An H100 or H200 has 132 multiprocessors. By estimate two programs for each keep its memory busy, and with fewer than
# FEWEST_PROGRAMS in all XLA's form is faster.
PROGRAMS, FEWEST_PROGRAMS = 256, 64
# Slots of a program, at least, where several share a head: its result then has at most a quarter of the bytes of its
# keys and values.
FEWEST_SLOTS = 1_024
STEP = 64  # slots that a program processes at a time
FEWEST_ROWS, MOST_ROWS = 16, 128  # of a program; a power of two
WIDTHS = (64, 128)  # of a head


def applies(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel supports q [B, N, T, H] over k [B, K, S, H] and is worth using."""
    if not supported(q, k) or q.shape[3] not in WIDTHS or rows_of(q, k) > MOST_ROWS or k.shape[2] % STEP:
        return False
    heads = heads_per_chip(k)
    if scores_per_chip(q, k) <= FEW_SCORES or heads * part_count(heads, k.shape[2]) < FEWEST_PROGRAMS:
        return False
    return multiplies_bfloat16(jax.devices()[0])


def multiplies_bfloat16(device: jax.Device) -> bool:
    """False for an NVIDIA GPU before Ampere, for which the kernel does not compile.

    Other devices count as supported, because the kernel is only selected on CUDA.
    """
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return not major.isdigit() or int(major) >= 8


def part_count(heads: int, slots: int) -> int:
    """Programs that share the slots of a head: the fewest that make PROGRAMS in all, as far as FEWEST_SLOTS allows.

    Args:
        heads: of all requests.  slots: a multiple of STEP; every program takes equally many steps.
    """
    most = max(slots // FEWEST_SLOTS, 1)
    counts = [count for count in range(1, most + 1) if slots // STEP % count == 0]
    return next((count for count in counts if count * heads >= PROGRAMS), counts[-1])


def kernel_call(q: jax.Array, k: jax.Array, v: jax.Array, words: jax.Array, length: int, interpret: bool) -> jax.Array:
    """A long_attention.KernelCall. The programs of a head run at the same time; their results are combined here.

    A part whose slots are all hidden from a row has the maximum MASKED there, so it fades to nothing.
    """
    batch, heads, unpadded, width = q.shape
    rows = max(FEWEST_ROWS, 1 << (unpadded - 1).bit_length())
    q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - unpadded), (0, 0)))
    slots, count = k.shape[2], words.shape[1]
    parts = part_count(batch * heads, slots)
    part_of_slots = pl.BlockSpec((None, None, slots // parts, width), lambda b, h, p: (b, h, p, 0))
    sums, tops, totals = pl.pallas_call(
        functools.partial(_kernel, length=length, scale=width**-0.5),
        grid=(batch, heads, parts),
        in_specs=[
            pl.BlockSpec((None, None, rows, width), lambda b, h, p: (b, h, 0, 0)),
            part_of_slots,
            part_of_slots,
            pl.BlockSpec((None, count, slots // parts), lambda b, h, p: (b, 0, p)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, rows, width), lambda b, h, p: (b, h, p, 0, 0)),
            *2 * [pl.BlockSpec((None, None, None, rows), lambda b, h, p: (b, h, p, 0))],
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, parts, rows, width), jnp.float32),
            *2 * [jax.ShapeDtypeStruct((batch, heads, parts, rows), jnp.float32)],
        ],
        compiler_params=triton.CompilerParams(num_warps=8 if rows == MOST_ROWS else 4, num_stages=2),
        interpret=interpret,
    )(q, k, v, words)
    fade = jnp.exp(tops - tops.max(axis=2, keepdims=True))
    out = (sums * fade[..., None]).sum(axis=2) / (totals * fade).sum(axis=2)[..., None]
    return out[:, :, :unpadded].astype(q.dtype)


def _kernel(q_ref, k_ref, v_ref, words_ref, sums_ref, tops_ref, totals_ref, *, length: int, scale: float):
    """A part of the slots of one head of one request: weighted sums of values, row maxima, sums of weights."""
    q = q_ref[...]
    rows, width = q.shape

    def step(index, carry):
        top_before, total, sums = carry
        here = pl.ds(index * STEP, STEP)
        scores = product(q, k_ref[here, :], 1) * scale
        words = [words_ref[word, here][None] for word in range(words_ref.shape[0])]
        scores = jnp.where(visible(words, rows, length), scores, MASKED)
        top = jnp.maximum(top_before, scores.max(axis=1))
        weights, fade = jnp.exp(scores - top[:, None]), jnp.exp(top_before - top)
        sums = sums * fade[:, None] + product(weights.astype(v_ref.dtype), v_ref[here, :], 0)
        return top, total * fade + weights.sum(axis=1), sums

    start = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows), jnp.zeros((rows, width))
    tops_ref[...], totals_ref[...], sums_ref[...] = jax.lax.fori_loop(0, k_ref.shape[0] // STEP, step, start)
