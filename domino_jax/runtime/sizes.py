"""Bytes of arrays on a device, and how they are printed."""

import math
from typing import Any

import jax

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def device_bytes(tree: Any) -> int:
    """Bytes of the leaves of a tree (arrays or jax.ShapeDtypeStruct) on one device, by their shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        placed = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.sharding is not None
        shape = leaf.sharding.shard_shape(leaf.shape) if placed else leaf.shape
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            total += math.prod(shape) * leaf.dtype.itemsize
    return total


def parameter_line(params: Any) -> str:
    """How many arrays a tree has, their parameters and bytes, and their bytes on one device."""
    leaves = jax.tree.leaves(params)
    counts = [math.prod(leaf.shape) for leaf in leaves]
    size = sum(count * leaf.dtype.itemsize for count, leaf in zip(counts, leaves, strict=True))
    whole = f"{len(leaves)} arrays, {sum(counts):,} parameters, {say_bytes(size)}"
    return f"{whole}, {say_bytes(device_bytes(leaves))} on each device"


def say_bytes(count: float) -> str:
    """1536 → "1.5 KiB"."""
    power = min(int(math.log(count, 1024)), len(UNITS) - 1) if count >= 1 else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {UNITS[power]}"
