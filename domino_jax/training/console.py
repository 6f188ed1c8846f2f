"""What a training run prints before its first step: the parameters and the devices."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax

from domino_jax.training.estimates import device_bytes

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def start_up_lines(drafter_params: Any, target_params: Any, mesh: jax.sharding.Mesh) -> list[str]:
    """All of it, a line an entry; the arguments are trees of arrays or jax.ShapeDtypeStructs."""
    return [
        "drafter, trained",
        *parameter_lines(drafter_params),
        "target, frozen",
        *parameter_lines(target_params),
        topology_line(mesh),
    ]


# ------------------------------------------------------------------------------------------------- parameters


def parameter_lines(params: Any) -> list[str]:
    """A table of the leaves: name, shape, dtype, count, bytes, and the sharding where there is one; a total below.

    Leaves whose names differ in a layer number alone share a line.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    groups: dict[tuple, list[Any]] = {}
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        kind = re.sub(r"(?<=[_/])\d+(?=/|$)", "*", name)
        groups.setdefault((kind, leaf.shape, str(leaf.dtype), _partition(leaf)), []).append(leaf)
    sharded = any(partition for _, _, _, partition in groups)
    rows = [["name", "shape", "dtype", "parameters", "bytes", "sharding"]]
    for (name, shape, dtype, partition), members in groups.items():
        times = f"{len(members)} × " if len(members) > 1 else ""
        size = "×".join(map(str, shape)) or "scalar"
        rows.append([name, times + size, dtype, *_sizes(members), partition or "whole"])
    everything = [leaf for _, leaf in leaves]
    total = "  {} arrays, {} parameters, {}".format(len(leaves), *_sizes(everything))
    if sharded:
        total += f", {say_bytes(device_bytes(everything))} per device"
    return [*_columns(rows if sharded else [row[:-1] for row in rows]), total]


def _sizes(leaves: Sequence[Any]) -> tuple[str, str]:
    """The number of parameters and their bytes, as they are printed."""
    counts = [math.prod(leaf.shape) for leaf in leaves]
    size = sum(count * leaf.dtype.itemsize for count, leaf in zip(counts, leaves, strict=True))
    return f"{sum(counts):,}", say_bytes(size)


def _partition(leaf: Any) -> str:
    """The mesh axes of each dimension, as "fsdp,tensor"; "" if every device has the whole array."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ""
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in sharding.spec]
    # An axis of one device cuts nothing.
    cut = [[axis for axis in names if sharding.mesh.shape[axis] > 1] for names in axes]
    return ",".join("+".join(names) or "–" for names in cut) if any(cut) else ""


def say_bytes(count: float) -> str:
    """1536 → "1.5 KiB"."""
    power = min(int(math.log(count, 1024)), len(UNITS) - 1) if count >= 1 else 0
    return f"{count / 1024**power:.{1 if power else 0}f} {UNITS[power]}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with their columns aligned; parameters and bytes, the fourth and fifth, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  " + "  ".join(f"{{:{'>' if place in (3, 4) else '<'}{width}}}" for place, width in enumerate(widths))
    return [form.format(*row).rstrip() for row in rows]


# --------------------------------------------------------------------------------------------------- topology


def topology_line(mesh: jax.sharding.Mesh) -> str:
    """The devices, the processes they belong to, and the mesh over them."""
    devices = list(mesh.devices.flat)
    processes = len({device.process_index for device in devices})
    line = f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform})"
    line += f" in {processes} processes" if processes > 1 else " in 1 process"
    return line + ", mesh " + " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
