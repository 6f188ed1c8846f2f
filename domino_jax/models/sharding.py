"""The mesh, the one table from parameter axes to mesh axes, and the constraints that the models put on their arrays.

Axes ("data", "fsdp", "tensor"): a batch is split over data and fsdp together, parameters and optimizer state over fsdp,
heads, feed-forward and vocabulary over tensor. Without a mesh (`jax.set_mesh`) every constraint here is the identity,
so the models know one way to run.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from domino_jax.runtime.errors import DominoError

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis → mesh axes.
LOGICAL = {
    "batch": ("data", "fsdp"),
    "groups": ("data",),  # rows on their way from a table that is split over fsdp
    "width": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "experts": ("tensor",),
    None: (),
}

# Module → the logical axes of its matrix, as it is stored. Every device holds all vectors (norm scales, biases).
MATRICES = {
    "embed_tokens": ("vocab", "width"),
    "lm_head": ("width", "vocab"),
    "q_proj": ("width", "heads"),
    "k_proj": ("width", "kv_heads"),
    "v_proj": ("width", "kv_heads"),
    "o_proj": ("heads", "width"),
    "gate_proj": ("width", "mlp"),
    "up_proj": ("width", "mlp"),
    "down_proj": ("mlp", "width"),
    "predecessor": ("vocab", "width"),
    "up": ("width", "vocab"),
}
ANY_MATRIX = ("width", None)  # of all other modules
EXPERTS = "experts"  # the module whose matrices have the experts of a layer as their first axis


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of all devices of all processes (or of `devices`); one size may be -1, the rest.

    Raises:
        DominoError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    known = int(np.prod([size for size in sizes.values() if size != -1]))
    rest = [axis for axis, size in sizes.items() if size == -1]
    if rest and len(devices) % known == 0:
        sizes[rest[0]] = len(devices) // known
    if int(np.prod(list(sizes.values()))) != len(devices):
        sizes_text = ", ".join(
            f"mesh.{axis}={size}" for axis, size in zip(MESH_AXES, (data, fsdp, tensor), strict=True)
        )
        raise DominoError(
            f"{sizes_text} need a multiple of {known} devices, but there are {len(devices)}; "
            "change the sizes so that their product is the number of devices (-1 is the rest)."
        )
    # Auto: the compiler propagates shardings; the Explicit default would turn constraints into assertions.
    return jax.make_mesh(tuple(sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over data and fsdp; all other axes whole."""
    return NamedSharding(mesh, PartitionSpec(LOGICAL["batch"]))


def row_shards(mesh: Mesh) -> int:
    """Into how many parts a batch is cut."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def param_shardings(mesh: Mesh, shapes: Any, kv_heads: int) -> Any:
    """A NamedSharding for every leaf of a parameter tree, or of a state that holds copies of one.

    Args:
        shapes: a tree whose leaves have a .shape; a leaf is known by the name of the module that holds it.
        kv_heads: K; keys and values are replicated over tensor when it does not divide them. Any other axis that its
            mesh axes do not divide is left whole too.
    """

    place = placement(mesh, kv_heads)

    def place_leaf(path: tuple, leaf: Any) -> NamedSharding:
        return place([_name(part) for part in path], leaf.shape)

    return jax.tree_util.tree_map_with_path(place_leaf, shapes)


def placement(mesh: Mesh, kv_heads: int) -> Callable[[Sequence[str], Sequence[int]], NamedSharding]:
    """(names on the way to a parameter, its shape) → its sharding, for reading weights straight to their devices."""

    def place(path: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        axes = [MATRICES[name] for name in path if name in MATRICES]
        if EXPERTS in path:
            check_experts(mesh, shape[0])
            split = (EXPERTS, *("width" if axis == "width" else None for axis in axes[-1]))
            return NamedSharding(mesh, _divide(mesh.shape, split, shape))
        if len(shape) != 2:
            return replicated(mesh)
        return NamedSharding(mesh, _divide(mesh.shape, axes[-1] if axes else ANY_MATRIX, shape, kv_heads))

    return place


def check_experts(mesh: Mesh | AbstractMesh, count: int) -> None:
    """Refuses experts that cannot be cut evenly over the tensor axis."""
    if count % mesh.shape["tensor"]:
        raise DominoError(
            f"a layer of the target has {count} experts, which mesh.tensor {mesh.shape['tensor']} does not divide; set"
            " it (to decode, decode.mesh.tensor) to a divisor."
        )


def decode_placement(mesh: Mesh, kv_heads: int, tied: bool) -> Callable[[Sequence[str], Sequence[int]], NamedSharding]:
    """`placement` for decoding: the head whole on every device, and an embedding that is no lm_head too.

    A collective for each drafted token costs more than the head's split saves where devices answer slowly.
    A tied embedding stays split, for the lm_head's sake.
    """
    place, whole = placement(mesh, kv_heads), replicated(mesh)

    def decode_place(path: Sequence[str], shape: Sequence[int]) -> NamedSharding:
        alone = "head" in path or ("embed_tokens" in path and not tied)
        return whole if alone else place(path, shape)

    return decode_place


def _name(part: Any) -> str | None:
    """The dictionary key or attribute that a step of a tree path takes."""
    if isinstance(part, jax.tree_util.DictKey):
        return part.key
    return part.name if isinstance(part, jax.tree_util.GetAttrKey) else None


def _divide(
    mesh: Mapping[str, int], axes: Sequence[str | None], shape: Sequence[int], kv_heads: int = 0
) -> PartitionSpec:
    """The leading dimensions split by their logical axes; an axis whose mesh axes do not divide it stays whole."""
    spec = []
    for axis, size in zip(axes, shape, strict=False):
        over = LOGICAL[axis]
        parts = math.prod(mesh[name] for name in over)
        divisible = size % parts == 0 and (axis != "kv_heads" or kv_heads % parts == 0)
        spec.append(over if over and divisible else None)
    return PartitionSpec(*spec)


# ------------------------------------------------------------------------------------------- inside the models


def _mesh_shape() -> Mapping[str, int] | None:
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh.shape


def on_mesh() -> bool:
    """Whether the current mesh has several devices."""
    return _mesh_shape() is not None


def shards(axis: str) -> int:
    """The number of parts into which the current mesh splits a logical axis; 1 without a mesh."""
    shape = _mesh_shape()
    return 1 if shape is None else math.prod(shape[name] for name in LOGICAL[axis])


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """x laid out by logical axes, one for each of its leading dimensions; an axis that does not divide stays whole."""
    if not on_mesh():
        return x
    return jax.lax.with_sharding_constraint(x, layout(x, *axes))


def constrain_rows(rows: jax.Array) -> jax.Array:
    """Rows [..., D] that are looked up in a table: each device takes its share of the width, then one exchange gives it
    whole rows."""
    return constrain(constrain(rows, "groups", *[None] * (rows.ndim - 2), "width"), "batch")


def layout(x: jax.Array, *axes: str | None) -> PartitionSpec:
    """The PartitionSpec by which `constrain` lays out x on the current mesh."""
    return _divide(_mesh_shape(), axes, x.shape)


def gather(matrix: jax.Array, module: str, dtype: Any = None, kv_heads: int | None = None) -> jax.Array:
    """A module's matrix as a product uses it: in `dtype`, whole over fsdp, split over tensor.

    Constrained at the use, so that the compiler never moves activations to the weights instead. Its gradient is
    scattered as it is summed: a plain constraint would have it summed whole on every device.

    Args:
        kv_heads: K where the matrix makes keys or values; a tensor axis that does not divide K leaves it whole.
    """
    if not on_mesh():
        return matrix if dtype is None else matrix.astype(dtype)
    stored = _stored(module, kv_heads)
    return _relaid(_cast(matrix, dtype, stored), stored, None)


def gather_for_loop(matrix: jax.Array, module: str, dtype: Any) -> jax.Array:
    """As `gather`, once for all turns of a loop: rounded to `dtype` but in its own type, in which the turns sum its
    gradient."""
    return _relaid(matrix, _stored(module), dtype) if on_mesh() else matrix


def _stored(module: str, kv_heads: int | None = None) -> tuple[str | None, ...]:
    """The logical axes by which a module's matrix is laid out on the current mesh."""
    whole = ["kv_heads"] if kv_heads is not None and kv_heads % shards("kv_heads") else []
    return tuple(None if axis in whole else axis for axis in MATRICES.get(module, ANY_MATRIX))


def _cast(matrix: jax.Array, dtype: Any, stored: tuple) -> jax.Array:
    """The matrix in `dtype`, laid out as it is stored: a bfloat16 step gathers two bytes a weight of its float32
    masters. Without the layout XLA gathers the masters, and casts them whole."""
    return matrix if dtype in (None, matrix.dtype) else constrain(matrix.astype(dtype), *stored)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _relaid(matrix: jax.Array, stored: tuple, dtype: Any) -> jax.Array:
    """A stored matrix whole over fsdp, by way of `dtype`; its gradient is laid out as it is stored."""
    used = (None if axis == "width" else axis for axis in stored)
    return constrain(_cast(matrix, dtype, stored), *used).astype(matrix.dtype)


def _relaid_forward(matrix, stored, dtype):
    return _relaid(matrix, stored, dtype), None


def _relaid_backward(stored, dtype, _, gradient):
    return (constrain(gradient, *stored),)


_relaid.defvjp(_relaid_forward, _relaid_backward)


# ------------------------------------------------------------------------------------------- rows and processes


def check_rows(mesh: Mesh, batch_size: int, accumulate: int = 1) -> None:
    """Refuses a batch whose micro-batches cannot be cut evenly over the data and fsdp axes."""
    parts = row_shards(mesh)
    multiple = parts * accumulate
    if batch_size % multiple:
        micro = f" × train.accumulate {accumulate}" if accumulate > 1 else ""
        raise DominoError(
            f"train.batch_size {batch_size} cannot be cut into mesh.data × mesh.fsdp = {parts} parts{micro}; make it a "
            f"multiple of {multiple}, as --config.train.batch_size={-(-batch_size // multiple) * multiple}."
        )


def process_rows(mesh: Mesh, batch_size: int) -> slice:
    """The rows of the global batch that this process supplies: one stretch, the same for processes that share rows.

    Raises:
        DominoError: its devices hold rows that are not consecutive.
    """
    shards = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    spans = sorted({index[0].indices(batch_size)[:2] for index in shards})
    start, stop = spans[0][0], spans[-1][1]
    if sum(end - begin for begin, end in spans) != stop - start:
        raise DominoError(
            f"the devices of this process hold the rows {spans} of a batch, which are not consecutive; "
            "let mesh.tensor × mesh.fsdp be a multiple, or a divisor, of the devices of a process."
        )
    return slice(start, stop)


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Host values, the same in every process, as arrays whole on every device; arrays on the mesh stay."""
    place = replicated(mesh)

    def put(leaf: Any) -> Any:
        there = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == mesh
        return leaf if there else jax.device_put(leaf, place)

    return jax.tree.map(put, tree)


def decode_layout(mesh: Mesh, state: Any) -> Any:
    """The shardings of a decoding state: caches [B, K, S, H] by rows and heads, what the host reads whole.

    Args:
        state: a tree whose leaves have a .shape.
    """

    def place(leaf: Any) -> NamedSharding:
        axes = ("batch", "kv_heads", None, None) if len(leaf.shape) == 4 else (None,) * len(leaf.shape)
        return NamedSharding(mesh, _divide(mesh.shape, axes, leaf.shape))

    return jax.tree.map(place, state)


def global_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process' rows of every array as parts of global arrays on the mesh."""
    sharding = batch_sharding(mesh)
    return {name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()}
