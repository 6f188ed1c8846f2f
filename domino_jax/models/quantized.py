"""Matrices in eight bits: values q [in, out], int8 or float8_e4m3fn, with float32 scales, and their products with rows.

Such a matrix is a dict {"q", "scale"} in the place of a floating one. `scale` is [1, out], one number for each output
channel, or [in / 128, out / 128], one for each tile of 128 × 128 values, as in Qwen's FP8 folders.

Decoding is as fast as its weights can be read, so no program may write a floating copy of a matrix. Scales are
therefore applied after the product: scaled before it, the compiler for GPUs writes a copy in every round, 2.5 times the
bytes of a bfloat16 matrix (docs/compilers.md).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from domino_jax.models import long_attention
from domino_jax.models.long_attention import REFUSED
from domino_jax.models.sharding import on_mesh

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
TILE = 128
# Rows of a product that are few enough to come from decoding. With more, the time goes into multiplying.
FEW_ROWS = 128
FEWEST_ROWS = 16  # of a product in the kernel for GPUs; a power of two
# Programs of that kernel, at least: by estimate 96, each with three tiles on their way, keep an H100's memory busy. If
# a matrix has fewer columns of tiles, several programs share the inputs of one, and each writes its sums to memory.
PROGRAMS = 96


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, Mapping) and "q" in leaf


def quantize(kernel: jax.Array, dtype: str) -> dict[str, jax.Array]:
    """A floating matrix [..., in, out] with one scale for each output channel: q = round(w / s), s = max |w| / LARGEST.

    The maximum is over the inputs of the channel (vector-wise absmax quantization, Dettmers et al., arXiv 2208.07339,
    equations 3 and 4; FP8: Micikevicius et al., arXiv 2209.05433, section 4). Ties go to even.

    Args:
        dtype: a key of LARGEST.
    """
    kernel = kernel.astype(jnp.float32)
    scale = jnp.abs(kernel).max(axis=-2, keepdims=True) / LARGEST[dtype]
    values = kernel / jnp.where(scale == 0, 1.0, scale)
    return {"q": (jnp.round(values) if dtype == "int8" else values).astype(dtype), "scale": scale}


def dequantized(matrix: Mapping[str, jax.Array]) -> jax.Array:
    """The matrix in float32, [..., in, out]."""
    q, scale = matrix["q"], matrix["scale"]
    if tiled(matrix):
        scale = scale.repeat(TILE, axis=-2).repeat(TILE, axis=-1)
    return q.astype(jnp.float32) * scale


def transposed(matrix: jax.Array | Mapping[str, jax.Array]) -> jax.Array | dict[str, jax.Array]:
    """A matrix [in, out] as [out, in], or the other way round; of one in eight bits the values, not the scales."""
    return {**matrix, "q": matrix["q"].T} if is_quantized(matrix) else matrix.T


def joinable(matrices: Sequence[jax.Array | Mapping[str, jax.Array]]) -> bool:
    """Whether one matrix can hold all: they are floating, or have a scale for each channel."""
    return len(set(map(is_quantized, matrices))) == 1 and not (is_quantized(matrices[0]) and any(map(tiled, matrices)))


def tiled(matrix: Mapping[str, jax.Array]) -> bool:
    return matrix["scale"].shape[-1] != matrix["q"].shape[-1]


def product(x: jax.Array, matrix: Mapping[str, jax.Array], once: bool = False) -> jax.Array:
    """x [..., in] times the matrix, in float32: [..., out].

    Args:
        once: no other product has this matrix or these rows. Otherwise the compiler for GPUs may join both, and write
            a matrix with scales by channel in x's type for that. A fence of its own hides from it that they are equal.
    """
    if not tiled(matrix):
        q = matrix["q"]
        if not once:
            fence = jax.lax.optimization_barrier
            x, q = jax.lax.platform_dependent(x, q, cuda=lambda *both: fence(both), default=lambda *both: both)
        return _sums("...i,io->...o", x, q) * matrix["scale"][0]
    rows = math.prod(x.shape[:-1])
    if rows > FEW_ROWS:
        return _by_copy(x, matrix)
    forms = {"cpu": _by_copy, "default": by_tiles}
    if "matrices in tiles" not in REFUSED and x.dtype == jnp.bfloat16 and not on_mesh():
        forms["cuda"] = functools.partial(by_kernel, interpret=False)
    out = jax.lax.platform_dependent(x.reshape(rows, -1), matrix, **forms)
    return out.reshape(*x.shape[:-1], -1)


def _sums(formula: str, x: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.einsum(formula, x, q.astype(x.dtype), preferred_element_type=jnp.float32)


def _by_copy(x: jax.Array, matrix: Mapping[str, jax.Array]) -> jax.Array:
    return _sums("...i,io->...o", x, dequantized(matrix))


def by_tiles(x: jax.Array, matrix: Mapping[str, jax.Array]) -> jax.Array:
    """One product for each row of tiles, whose sums [T, out] are then scaled."""
    q, scale = matrix["q"], matrix["scale"]
    tiles = x.reshape(len(x), -1, TILE)
    sums = _sums("tbi,bio->bto", tiles, q.reshape(-1, TILE, q.shape[1]))
    scaled = sums.reshape(*sums.shape[:2], -1, TILE) * scale[:, None, :, None]
    return scaled.sum(axis=0).reshape(len(x), -1)


# ---------------------------------------------------------------------------------------------- the kernel for GPUs


def by_kernel(x: jax.Array, matrix: Mapping[str, jax.Array], interpret: bool) -> jax.Array:
    """`product` of x bfloat16 [T, in] and tiles: a program computes 128 channels from a share of the inputs.

    interpret: run the kernel as ordinary JAX operations, on any device.
    """
    q, scale = matrix["q"], matrix["scale"]
    count, width = x.shape[0], q.shape[1]
    rows = max(FEWEST_ROWS, 1 << (count - 1).bit_length())  # a block reaches beyond x; no program touches that
    columns = width // TILE
    shares = math.gcd(1 << (-(-PROGRAMS // columns) - 1).bit_length(), len(scale))
    tiles = len(scale) // shares
    parts = pl.pallas_call(
        functools.partial(_kernel, count=count),
        grid=(columns, shares),
        in_specs=[
            pl.BlockSpec((rows, tiles * TILE), lambda column, share: (0, share)),
            pl.BlockSpec((tiles * TILE, TILE), lambda column, share: (share, column)),
            pl.BlockSpec((tiles, 1), lambda column, share: (share, column)),
        ],
        out_specs=pl.BlockSpec((None, rows, TILE), lambda column, share: (share, 0, column)),
        out_shape=jax.ShapeDtypeStruct((shares, count, width), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4 if rows < FEW_ROWS else 8, num_stages=3),
        interpret=interpret,
    )(x, q, scale)
    return parts.sum(axis=0)


def _kernel(x_ref, q_ref, scale_ref, out_ref, *, count: int):
    there = jnp.broadcast_to((jnp.arange(len(x_ref)) < count)[:, None], out_ref.shape)

    def add(tile, sums):
        inputs = pl.ds(tile * TILE, TILE)
        x = triton.load(x_ref.at[:, inputs], mask=there, other=0)
        return sums + long_attention.product(x, q_ref[inputs, :].astype(x.dtype), 0) * scale_ref[tile, 0]

    start = jnp.zeros(out_ref.shape, jnp.float32)
    triton.store(out_ref, jax.lax.fori_loop(0, scale_ref.shape[0], add, start), mask=there)
