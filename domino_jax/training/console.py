"""What a training run prints before its first step: the parameters and the mesh."""

import math
from typing import Any

import jax

from domino_jax.training.estimates import device_bytes

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def start_up_lines(drafter_params: Any, target_params: Any, mesh: jax.sharding.Mesh) -> list[str]:
    """All of it, a line an entry; the arguments are trees of arrays or jax.ShapeDtypeStructs."""
    return [
        f"drafter, trained: {parameter_line(drafter_params)}",
        f"target, frozen: {parameter_line(target_params)}",
        "mesh " + " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
    ]


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
