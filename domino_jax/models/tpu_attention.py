"""Attention over a long cache as one Pallas kernel for TPUs that keeps the scores in vector memory.

XLA writes the scores of a pass to main memory and reads them back several times once they no longer fit in vector
memory. For 17 rows of Qwen3-8B the float32 scores have half the bytes of a layer's keys and values, and moving them
four times made a round move two to three times the bytes that it must (docs/compile_decode.md). The kernel processes
the slots in parts and combines them with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from domino_jax.models.shapes import MASKED, Mask
from domino_jax.models.sharding import LOGICAL, shards

# Up to this many scores per chip, 2 MB in float32, mostly stay in vector memory in programs without the kernel.
FEW_SCORES = 2**19
# Slots per part: at most MOST_SLOTS, with at most PART_SCORES scores, 1 MB in float32; by default a kernel has 16 MB.
MOST_SLOTS, PART_SCORES = 4_096, 2**18
FEWEST_SLOTS = 512  # of a part: by estimate, smaller ones take longer to begin than to compute
LANES = 128  # of a register, and numbers of a head
ROW_TILE = 16  # rows of a bfloat16 tile
MOST_ROWS = PART_SCORES // FEWEST_SLOTS  # query rows of one key/value head
BITS = 32  # rows whose mask bits share one integer


def applies(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel supports q [B, N, T, H] over k [B, K, S, H] and is worth using. It supports bfloat16 alone."""
    batch_parts, head_parts = shards("batch"), shards("heads")
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16 or q.shape[3] != LANES:
        return False
    rows, slots = q.shape[1] // k.shape[1] * q.shape[2], k.shape[2]
    if rows > MOST_ROWS or slots % LANES or q.shape[0] % batch_parts or k.shape[1] % head_parts:
        return False
    scores = q.shape[0] * q.shape[1] * q.shape[2] * slots // (batch_parts * head_parts)
    return scores > FEW_SCORES and part_size(rows, slots) >= min(slots, FEWEST_SLOTS)


def part_size(rows: int, slots: int) -> int:
    """Slots of a part: the largest multiple of LANES that divides `slots`, a multiple of it, within the limits."""
    most = min(MOST_SLOTS, PART_SCORES // (rows + -rows % ROW_TILE))
    return next(size for size in range(most - most % LANES, 0, -LANES) if slots % size == 0)


def attend_long(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, interpret: bool = False) -> jax.Array:
    """Attention of q bfloat16 [B, N, T, H] over k, v [B, K, S, H] → [B, N, T, H], as `attention.attend` defines it.

    Args:
        mask: bool [1 or B, T, S].  interpret: run the kernel as ordinary JAX operations, on any device.
    """
    batch, rows = q.shape[0], q.shape[1] // k.shape[1] * q.shape[2]
    words = jnp.broadcast_to(_words(mask), (batch, -(-q.shape[2] // BITS), k.shape[2]))
    by_head = q.reshape(batch, k.shape[1], rows, q.shape[3])
    by_head = jnp.pad(by_head, ((0, 0), (0, 0), (0, -rows % ROW_TILE), (0, 0)))
    kernel = functools.partial(_kernel_call, length=q.shape[2], interpret=interpret)
    if shards("batch") * shards("heads") > 1:
        spec = PartitionSpec(LOGICAL["batch"], LOGICAL["heads"])
        alone = PartitionSpec(LOGICAL["batch"])
        kernel = jax.shard_map(kernel, in_specs=(spec, spec, spec, alone), out_specs=spec, check_vma=False)
    out = kernel(by_head, k, v, words)[:, :, :rows].reshape(q.shape)
    return jnp.where(mask.any(-1)[:, None, :, None], out, jnp.zeros((), q.dtype))


def _words(mask: Mask) -> jax.Array:
    """bool [B, T, S] → int32 [B, ceil(T / 32), S]: bit t % 32 of word t // 32 is row t of the mask.

    As bits, the mask takes 4 bytes a slot for every 32 rows, not one byte for each row.
    """
    count = -(-mask.shape[1] // BITS)
    mask = jnp.pad(mask, ((0, 0), (0, count * BITS - mask.shape[1]), (0, 0)))
    bits = (
        mask.reshape(mask.shape[0], count, BITS, -1).astype(jnp.uint32) << jnp.arange(BITS, dtype=jnp.uint32)[:, None]
    )
    return jax.lax.bitcast_convert_type(bits.sum(axis=2, dtype=jnp.uint32), jnp.int32)


def _kernel_call(
    q: jax.Array, k: jax.Array, v: jax.Array, words: jax.Array, *, length: int, interpret: bool
) -> jax.Array:
    """q [B, K, P, H] (P: R·T rows and padding) over k, v [B, K, S, H] → [B, K, P, H].  length: T."""
    batch, heads, rows, width = q.shape
    slots, count = k.shape[2], words.shape[1]
    part = part_size(rows, slots)
    whole = pl.BlockSpec((1, 1, rows, width), lambda b, h, s: (b, h, 0, 0))
    some = pl.BlockSpec((1, 1, part, width), lambda b, h, s: (b, h, s, 0))
    return pl.pallas_call(
        functools.partial(_kernel, length=length, scale=width**-0.5),
        grid=(batch, heads, slots // part),
        in_specs=[whole, some, some, pl.BlockSpec((1, count, part), lambda b, h, s: (b, 0, s))],
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

    scores = _product(q_ref[0, 0], k_ref[0, 0], 1) * scale
    scores = jnp.where(_seen(words_ref[0], scores.shape[0], length), scores, MASKED)
    before = top_ref[:, :1]
    top = jnp.maximum(before, scores.max(axis=1, keepdims=True))
    weights, fade = jnp.exp(scores - top), jnp.exp(before - top)
    total = total_ref[:, :1] * fade + weights.sum(axis=1, keepdims=True)
    sum_ref[...] = sum_ref[...] * fade + _product(weights.astype(v_ref.dtype), v_ref[0, 0], 0)
    top_ref[...] = jnp.broadcast_to(top, top_ref.shape)
    total_ref[...] = jnp.broadcast_to(total, total_ref.shape)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        out_ref[0, 0] = (sum_ref[...] / total_ref[:, :1]).astype(out_ref.dtype)


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Contracts x's last axis with the given axis of y, accumulating in float32.

    The precision is stated, because a process may have set jax_default_matmul_precision for float32, and a TPU kernel
    refuses a higher one for bfloat16.
    """
    contract = (((1,), (axis,)), ((), ()))
    precision = jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(x, y, contract, precision=precision, preferred_element_type=jnp.float32)


def _seen(words: jax.Array, rows: int, length: int) -> jax.Array:
    """Words [W, C] of a part → bool [rows, C]: row r of a head is masked as token r % length."""
    token = jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0) % length
    word = words[0:1]
    for index in range(1, words.shape[0]):
        word = jnp.where(token // BITS == index, words[index : index + 1], word)
    return (word >> token % BITS) & 1 == 1
