"""Parts that the kernels for attention over a long cache share: the mask as bits, products, the layout over a mesh.

XLA writes the scores of a pass to main memory and reads them back several times once they no longer fit in a chip's
fast memory. For 17 rows of Qwen3-8B the float32 scores have half the bytes of a layer's keys and values, and moving
them four times made a round move two to three times the bytes that it must (docs/compilers.md). A kernel processes
the slots in parts and combines them with a running maximum and sum (Milakov and Gimelshein, arXiv 1805.02867).

Letters beside those of the shapes module: P rows of one key/value head (R·T, with padding), C slots of a part, W words
of the mask.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from domino_jax.models.shapes import Mask
from domino_jax.models.sharding import LOGICAL, shards

REFUSED: dict[str, str] = {}  # kernel → why XLA's form is used instead (kernels.py); read while programs are traced
BITS = 32  # rows whose mask bits share one integer
# (q [B, K, R·T, H], k, v [B, K, S, H], words int32 [B, W, S], T, interpret) → as q
KernelCall = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, int, bool], jax.Array]


def rows_of(q: jax.Array, k: jax.Array) -> int:
    """R·T, the query rows of one key/value head."""
    return q.shape[1] // k.shape[1] * q.shape[2]


def supported(q: jax.Array, k: jax.Array) -> bool:
    """Whether q [B, N, T, H] and k are bfloat16, and the current mesh divides requests and heads evenly."""
    bfloat16 = q.dtype == jnp.bfloat16 and k.dtype == jnp.bfloat16
    return bfloat16 and not q.shape[0] % shards("batch") and not k.shape[1] % shards("heads")


def heads_per_chip(k: jax.Array) -> int:
    """Key/value heads of all requests of one chip."""
    return k.shape[0] * k.shape[1] // (shards("batch") * shards("heads"))


def scores_per_chip(q: jax.Array, k: jax.Array) -> int:
    return heads_per_chip(k) * rows_of(q, k) * k.shape[2]


def attend_long(
    kernel_call: KernelCall, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, interpret: bool = False
) -> jax.Array:
    """Attention of q bfloat16 [B, N, T, H] over k, v [B, K, S, H] → [B, N, T, H], as `attention.attend` defines it.

    Args:
        kernel_call: computes the requests and heads of one device; a query that reads nothing returns zeros.
        mask: bool [1 or B, T, S].  interpret: run the kernel as ordinary JAX operations, on any device.
    """
    batch, length = q.shape[0], q.shape[2]
    words = jnp.broadcast_to(mask_words(mask), (batch, -(-length // BITS), k.shape[2]))
    by_device = functools.partial(kernel_call, length=length, interpret=interpret)
    if shards("batch") * shards("heads") > 1:
        spec = PartitionSpec(LOGICAL["batch"], LOGICAL["heads"])
        spec_of_words = PartitionSpec(LOGICAL["batch"])
        specs = (spec, spec, spec, spec_of_words)
        by_device = jax.shard_map(by_device, in_specs=specs, out_specs=spec, check_vma=False)
    return by_device(q.reshape(batch, k.shape[1], rows_of(q, k), q.shape[3]), k, v, words).reshape(q.shape)


def mask_words(mask: Mask) -> jax.Array:
    """bool [B, T, S] → int32 [B, ceil(T / 32), S]: bit t % 32 of word t // 32 is row t of the mask.

    As bits, the mask takes 4 bytes a slot for every 32 rows, not one byte for each row.
    """
    count = -(-mask.shape[1] // BITS)
    mask = jnp.pad(mask, ((0, 0), (0, count * BITS - mask.shape[1]), (0, 0)))
    bits = (
        mask.reshape(mask.shape[0], count, BITS, -1).astype(jnp.uint32) << jnp.arange(BITS, dtype=jnp.uint32)[:, None]
    )
    return jax.lax.bitcast_convert_type(bits.sum(axis=2, dtype=jnp.uint32), jnp.int32)


def visible(words: list[jax.Array], rows: int, length: int, first: int = 0) -> jax.Array:
    """Words of a part, [1, C] each → bool [rows, C] of rows from `first` on: row r is masked as token r % length."""
    token = (first + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)) % length
    word = words[0]
    for index, other in enumerate(words[1:], 1):
        word = jnp.where(token // BITS == index, other, word)
    return (word >> token % BITS) & 1 == 1


def product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """Contracts x's last axis with the given axis of y, accumulating in float32.

    The precision is stated, because a process may have set jax_default_matmul_precision for float32, and a TPU kernel
    refuses a higher one for bfloat16.
    """
    contract = (((1,), (axis,)), ((), ()))
    precision = jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(x, y, contract, precision=precision, preferred_element_type=jnp.float32)
