"""Attention over a long cache as one Pallas kernel for TPUs, which keeps the scores in vector memory."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from domino_jax.models.long_attention import product, rows_of, scores_per_chip, supported, visible
from domino_jax.models.shapes import MASKED

# Up to this many scores per chip, 2 MB in float32, mostly stay in vector memory in programs without the kernel.
FEW_SCORES = 2**19
# Slots per part: at most MOST_SLOTS, with at most PART_SCORES scores, 1 MB in float32; by default a kernel has 16 MB.
MOST_SLOTS, PART_SCORES = 4_096, 2**18
FEWEST_SLOTS = 512  # of a part: by estimate, smaller ones take longer to begin than to compute
LANES = 128  # of a register, and numbers of a head
ROW_TILE = 16  # rows of a bfloat16 tile
MOST_ROWS = PART_SCORES // FEWEST_SLOTS  # query rows of one key/value head


def applies(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel supports q [B, N, T, H] over k [B, K, S, H] and is worth using."""
    rows, slots = rows_of(q, k), k.shape[2]
    if not supported(q, k) or q.shape[3] != LANES or rows > MOST_ROWS or slots % LANES:
        return False
    return scores_per_chip(q, k) > FEW_SCORES and part_size(rows, slots) >= min(slots, FEWEST_SLOTS)


def part_size(rows: int, slots: int) -> int:
    """Slots of a part: the largest multiple of LANES that divides `slots`, a multiple of it, within the limits."""
    most = min(MOST_SLOTS, PART_SCORES // (rows + -rows % ROW_TILE))
    return next(size for size in range(most - most % LANES, 0, -LANES) if slots % size == 0)


def kernel_call(q: jax.Array, k: jax.Array, v: jax.Array, words: jax.Array, length: int, interpret: bool) -> jax.Array:
    """A long_attention.KernelCall. The parts of a head follow one another, and the last one writes its result."""
    batch, heads, unpadded, width = q.shape
    q = jnp.pad(q, ((0, 0), (0, 0), (0, -unpadded % ROW_TILE), (0, 0)))
    rows, slots, count = q.shape[2], k.shape[2], words.shape[1]
    part = part_size(rows, slots)
    if not interpret:
        # Otherwise the compiler for a v6e moves caches of a small target to vector memory, writes new rows there, and
        # writes the whole caches back: 0.5 of the 2.5 GB of a round of 0.6B with FP8 tiles.
        k, v = (pltpu.with_memory_space_constraint(cache, pltpu.HBM) for cache in (k, v))
    whole = pl.BlockSpec((1, 1, rows, width), lambda b, h, s: (b, h, 0, 0))
    part_of_slots = pl.BlockSpec((1, 1, part, width), lambda b, h, s: (b, h, s, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, length=length, scale=width**-0.5),
        grid=(batch, heads, slots // part),
        in_specs=[whole, part_of_slots, part_of_slots, pl.BlockSpec((1, count, part), lambda b, h, s: (b, 0, s))],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[pltpu.VMEM((rows, size), jnp.float32) for size in (LANES, LANES, width)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * rows * slots * width,
            transcendentals=batch * heads * rows * slots,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (q, k, v, words, q)),
        ),
        interpret=interpret,
    )(q, k, v, words)
    return out[:, :, :unpadded]


def _kernel(q_ref, k_ref, v_ref, words_ref, out_ref, top_ref, total_ref, sum_ref, *, length: int, scale: float):
    """One part of the slots of one head of one request.

    The row maxima and the sums of weights, repeated in every lane, and the weighted sums of values are carried from one
    part to the next.
    """

    @pl.when(pl.program_id(2) == 0)
    def _():
        top_ref[...] = jnp.full_like(top_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    scores = product(q_ref[0, 0], k_ref[0, 0], 1) * scale
    words = words_ref[0]
    words = [words[index : index + 1] for index in range(words.shape[0])]
    scores = jnp.where(visible(words, scores.shape[0], length), scores, MASKED)
    before = top_ref[:, :1]
    top = jnp.maximum(before, scores.max(axis=1, keepdims=True))
    weights, fade = jnp.exp(scores - top), jnp.exp(before - top)
    total = total_ref[:, :1] * fade + weights.sum(axis=1, keepdims=True)
    sum_ref[...] = sum_ref[...] * fade + product(weights.astype(v_ref.dtype), v_ref[0, 0], 0)
    top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
    total_ref[...] = jnp.broadcast_to(total, total_ref.shape)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        out = jnp.where(top_ref[:, :1] > MASKED, sum_ref[...] / total_ref[:, :1], 0.0)
        out_ref[0, 0] = out.astype(out_ref.dtype)
