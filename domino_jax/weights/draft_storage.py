"""A drafter's parameters as decoding stores them: the head's last matrix by rows, and matrices in eight bits."""

from typing import Any

import jax

from domino_jax.models.quantized import is_quantized, quantize, transposed

MATRICES = ("kernel", "weight_ih", "weight_hh")  # names of the parameters that layers.multiply takes


def rows_together(params: dict) -> dict:
    """A drafter's parameters with the head's last matrix as up/rows [V, E], not up/kernel [E, V].

    A draft reads the rows of its candidates (Head.rows). The compiler for TPUs would copy the whole matrix into this
    order in every round. A layout of [E, V] with that order is not enough: the compiler for GPUs copies it back before
    the loop of rounds. On a CPU nothing changes.

    Args:
        params: arrays, or shapes with their shardings, the head whole on every device.
    """
    if "head" not in params:
        return params
    kernel = params["head"]["up"]["kernel"]
    values = kernel["q"] if is_quantized(kernel) else kernel
    if any(device.platform == "cpu" for device in values.sharding.device_set):
        return params
    if isinstance(values, jax.ShapeDtypeStruct):
        rows = jax.ShapeDtypeStruct(values.shape[::-1], values.dtype, sharding=values.sharding)
        rows = {**kernel, "q": rows} if is_quantized(kernel) else rows
    else:
        rows = jax.jit(transposed)(kernel)
    return {**params, "head": {**params["head"], "up": {"rows": rows}}}


def quantized_matrices(params: dict) -> dict:
    """A drafter's parameters with all matrices of its products in int8, one scale for each output channel.

    Tables of tokens, of which a draft reads single rows, stay as they are.
    """

    def convert(path: tuple, leaf: Any) -> Any:
        rounded = path[-1].key in MATRICES and not is_quantized(leaf) and leaf.ndim == 2
        return jax.jit(quantize, static_argnums=1)(leaf, "int8") if rounded else leaf

    return jax.tree_util.tree_map_with_path(convert, params, is_leaf=is_quantized)
