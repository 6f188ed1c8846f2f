"""The product of rows with their experts (moe.py) as two Pallas kernels for NVIDIA GPUs.

As in block-sparse expert layers (Gale et al., arXiv 2211.15841, section 4), the rows of an expert are padded to whole
blocks, so that a program has one block of rows, one expert and a few of its output columns. Only experts in use are
read, each once for a block of rows.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from domino_jax.models import long_attention, quantized

FEWEST_ROWS, MOST_ROWS = 16, 64  # of a block; powers of two
COLUMNS = 64  # of a program
INPUTS = quantized.TILE  # that a program reads at a time


def applies(x: jax.Array, matrices: Mapping[str, Any]) -> bool:
    """Whether the kernels support rows x [T, D] and these matrices."""
    _, inputs, hidden = jax.tree.leaves(matrices["up_proj"])[0].shape
    return inputs % INPUTS == 0 and hidden % INPUTS == 0 and x.dtype == jnp.bfloat16


def by_kernel(
    x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Mapping[str, Any], interpret: bool
) -> jax.Array:
    """A form of moe.py, for x in bfloat16.

    interpret: run the kernels as ordinary JAX operations, on any device.
    """
    count = jax.tree.leaves(matrices)[0].shape[0]
    total = experts.size
    rows = min(max(FEWEST_ROWS, 1 << (total // count).bit_length()), MOST_ROWS)
    blocks = min(count, total) + total // rows  # at most, whatever the router chooses
    places, expert_of_block, used = _blocks(experts.reshape(-1), count, rows, blocks)
    source = jnp.full(blocks * rows, len(x)).at[places].set(jnp.arange(total) // experts.shape[1], mode="drop")
    weight = jnp.zeros(blocks * rows, jnp.float32).at[places].set(weights.reshape(-1), mode="drop")
    run = functools.partial(_call, blocks=blocks, rows=rows, interpret=interpret)
    sorted_rows = jnp.take(x, source, axis=0, mode="fill", fill_value=0)
    up = (sorted_rows, weight, expert_of_block, used, matrices["gate_proj"], matrices["up_proj"])
    hidden = run(_up_kernel, *up, dtype=x.dtype)
    out = run(_down_kernel, hidden, expert_of_block, used, matrices["down_proj"], dtype=jnp.float32)
    taken = jnp.take(out, places, axis=0, mode="fill", fill_value=0)
    return taken.reshape(*experts.shape, -1).sum(axis=1)


def _blocks(flat: jax.Array, count: int, rows: int, blocks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The place of each of the pairs of row and expert, the expert of each block, and [1] the number of blocks in use.

    flat: int32 [T·k], experts; `count` means none, and its place is after all blocks.
    """
    sizes = jnp.zeros(count, jnp.int32).at[flat].add(1, mode="drop")
    ends = jnp.cumsum(-(-sizes // rows))
    moved = (jnp.pad(ends, (1, 0))[:-1] * rows - (jnp.cumsum(sizes) - sizes))[jnp.minimum(flat, count - 1)]
    sorted_places = jnp.argsort(jnp.argsort(flat, stable=True))
    places = jnp.where(flat < count, sorted_places + moved, blocks * rows)
    expert_of_block = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    return places, jnp.minimum(expert_of_block, count - 1).astype(jnp.int32), ends[-1:].astype(jnp.int32)


def _call(kernel, x: jax.Array, *arguments, blocks: int, rows: int, dtype: Any, interpret: bool) -> jax.Array:
    """A kernel over all blocks and output columns: [blocks · rows, outputs]."""
    width = jax.tree.leaves(arguments[-1])[0].shape[2]
    first = [pl.BlockSpec((rows, x.shape[1]), lambda block, column: (block, 0))]
    if arguments[0].dtype == jnp.float32:
        first.append(pl.BlockSpec((rows,), lambda block, column: (block,)))
    # Programs find their expert themselves, in the whole arrays.
    whole = [pl.BlockSpec(memory_space=pl.ANY) for _ in jax.tree.leaves(arguments)][len(first) - 1 :]
    places = jax.tree.unflatten(jax.tree.structure((x, *arguments)), [*first, *whole])
    return pl.pallas_call(
        kernel,
        grid=(blocks, width // COLUMNS),
        in_specs=list(places),
        out_specs=pl.BlockSpec((rows, COLUMNS), lambda block, column: (block, column)),
        out_shape=jax.ShapeDtypeStruct((blocks * rows, width), dtype),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(x, *arguments)


def _up_kernel(x_ref, weight_ref, experts_ref, used_ref, gate_ref, up_ref, out_ref):
    gate, up = (_sums(x_ref, experts_ref, used_ref, matrix) for matrix in (gate_ref, up_ref))
    out_ref[...] = (jax.nn.silu(gate) * up * weight_ref[...][:, None]).astype(out_ref.dtype)


def _down_kernel(x_ref, experts_ref, used_ref, down_ref, out_ref):
    out_ref[...] = _sums(x_ref, experts_ref, used_ref, down_ref)


def _sums(x_ref, experts_ref, used_ref, matrix) -> jax.Array:
    """The block's rows times the program's columns of its expert's matrix; nothing is read for a block not in use."""
    block, column = pl.program_id(0), pl.program_id(1)
    expert, columns = experts_ref[block], pl.ds(column * COLUMNS, COLUMNS)
    in_eight_bits = quantized.is_quantized(matrix)
    values = matrix["q"] if in_eight_bits else matrix
    tiled = in_eight_bits and quantized.tiled(matrix)

    def add(tile, sums):
        inputs = pl.ds(tile * INPUTS, INPUTS)
        more = long_attention.product(x_ref[:, inputs], values[expert, inputs, columns].astype(x_ref.dtype), 0)
        return sums + (more * matrix["scale"][expert, tile, column * COLUMNS // quantized.TILE] if tiled else more)

    # Not by jnp.where: as the bound of a loop its result has the type i1, which Triton refuses (jax 0.10.2).
    tiles = (block < used_ref[0]).astype(jnp.int32) * (x_ref.shape[1] // INPUTS)
    sums = jax.lax.fori_loop(0, tiles, add, jnp.zeros((x_ref.shape[0], COLUMNS), jnp.float32))
    return sums * matrix["scale"][expert, 0, columns][None] if in_eight_bits and not tiled else sums
