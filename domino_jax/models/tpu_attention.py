"""Attention over a long cache as one Pallas kernel for TPUs, which keeps the scores in the chip's vector memory.

XLA writes the scores of a pass to main memory and reads them several times once they outgrow vector memory. Those of 17
rows over a slot of Qwen3-8B, in float32, have twice the bytes of its keys and values, so a round over many slots or for
many requests moved two to three times the bytes that it must (docs/compile_decode.md). The kernel reads a part of the
slots at a time and joins the parts by a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from domino_jax.models.shapes import Mask
from domino_jax.models.sharding import LOGICAL, shards

# Finite, so that a row whose keys are all masked gives no NaN (-inf minus -inf).
MASKED = -1e30
# Scores of a chip that stay in vector memory without the kernel, 2 MB in float32.
FEW_SCORES = 2**19
# Slots of a part: the most that divide the cache and give PART_SCORES or fewer, 1 MB in float32 (a v5e has 16 MB).
PARTS, PART_SCORES = (4_096, 2_048, 1_024, 512, 256, 128), 2**18
LANES = 128  # of a register
ROW_TILE = 16  # rows of a bfloat16 register
MOST_ROWS = PART_SCORES // PARTS[-1]  # of one key/value head
BITS = 32  # rows whose masks share one integer


def applies(q: jax.Array, k: jax.Array) -> bool:
    """Whether the kernel is worth it for q [B, N, T, H] over k [B, K, S, H], and can compute it.

    Only in bfloat16: float32 products of a kernel would be less exact than XLA's at "highest" precision.
    """
    rows, heads = shards("batch"), shards("heads")
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16 or q.shape[0] % rows or k.shape[1] % heads:
        return False
    if k.shape[2] % PARTS[-1] or q.shape[3] % LANES or q.shape[1] // k.shape[1] * q.shape[2] > MOST_ROWS:
        return False
    return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] // (rows * heads) > FEW_SCORES


def attend_long(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, interpret: bool = False) -> jax.Array:
    """Attention of q bfloat16 [B, N, T, H] over k, v [B, K, S, H] → [B, N, T, H], as `attention.attend` defines it.

    Args:
        mask: bool [1 or B, T, S].  interpret: run the kernel's steps as JAX operations, on any device.
    """
    batch, groups, rows = q.shape[0], q.shape[1] // k.shape[1], q.shape[1] // k.shape[1] * q.shape[2]
    words = jnp.broadcast_to(_words(mask), (batch, -(-q.shape[2] // BITS), k.shape[2]))
    by_head = q.reshape(batch, k.shape[1], rows, q.shape[3])
    by_head = jnp.pad(by_head, ((0, 0), (0, 0), (0, -rows % ROW_TILE), (0, 0)))
    kernel = functools.partial(_kernel_call, length=q.shape[2], interpret=interpret)
    if shards("batch") * shards("heads") > 1:
        spec = PartitionSpec(LOGICAL["batch"], LOGICAL["heads"])
        alone = PartitionSpec(LOGICAL["batch"])
        kernel = jax.shard_map(kernel, in_specs=(spec, spec, spec, alone), out_specs=spec, check_vma=False)
    out = kernel(by_head, k, v, words)[:, :, :rows].reshape(q.shape)
    seen = jnp.tile(mask.any(-1), (1, groups)).reshape(-1, groups, mask.shape[1])
    return jnp.where(jnp.tile(seen, (1, k.shape[1], 1))[..., None], out, jnp.zeros((), q.dtype))


def _words(mask: Mask) -> jax.Array:
    """bool [B, T, S] → int32 [B, ceil(T / 32), S]: bit t % 32 of word t // 32 is row t of the mask.

    As bits the mask of a layer has 4 bytes a slot instead of one for every row.
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
    part = next(size for size in PARTS if slots % size == 0 and rows * size <= PART_SCORES)
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
        interpret=interpret,
    )(q, k, v, words)


def _kernel(q_ref, k_ref, v_ref, words_ref, out_ref, top_ref, total_ref, sum_ref, *, length: int, scale: float):
    """One part of the slots of one head of one request.

    From part to part stay the maximum of each row's scores and its sum of weights, the same in every lane, and its
    weighted sum of values.
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
    """x's last axis with this one of y, in float32."""
    return jax.lax.dot_general(x, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _seen(words: jax.Array, rows: int, length: int) -> jax.Array:
    """Words [W, C] of a part → bool [rows, C]: row r of a head has the mask of token r % length."""
    token = jax.lax.broadcasted_iota(jnp.int32, (rows, words.shape[1]), 0) % length
    word = words[0:1]
    for index in range(1, words.shape[0]):
        word = jnp.where(token // BITS == index, words[index : index + 1], word)
    return (word >> token % BITS) & 1 == 1
