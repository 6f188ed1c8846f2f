"""FLOPs of a training step, by the matrix products of its jaxpr; peaks of known devices."""

import re
from typing import Any

import numpy as np

# Dense bfloat16 operations a second of one device, by JAX's device_kind or a topology's name; the first match counts.
# From the makers' data sheets, without sparsity.
PEAKS = (
    (r"TPU v4|^v4\b", 275e12),
    (r"TPU v5 ?lite|v5e", 197e12),
    (r"TPU v5|v5p", 459e12),
    (r"TPU v6|v6e", 918e12),
    (r"TPU7x", 1153.5e12),  # half of a chip
    (r"H100 PCIe", 756e12),
    (r"H[12]00 NVL", 835e12),
    (r"H100|H200", 989e12),
    (r"A100", 312e12),
    (r"B200", 2250e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by its kind ("TPU v5 lite", "NVIDIA H200", "v5e"); None where it is unknown."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, device_kind, re.IGNORECASE)), None)


def product_flops(jaxpr: Any) -> float:
    """FLOPs of all matrix products of a (closed) jaxpr over all devices, loops by their length, and of nothing else.

    Work repeated in a backward pass counts again, and so do scores outside an attention mask: this is what the program
    does. Elementwise work is left out; it is under one in a hundred at the public sizes. The most expensive branch
    counts, and of those for kinds of devices (`jax.lax.platform_dependent`) the default.
    """
    jaxpr = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot_flops(equation)
        if equation.primitive.name == "ragged_dot_general":  # rows, each by the matrix of its group
            total += 2.0 * equation.invars[0].aval.size * equation.outvars[0].aval.shape[-1]
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        if equation.primitive.name == "shard_map":  # its shapes are per device
            times = equation.params["mesh"].size
        inner = [product_flops(inner) for inner in _inner(equation.params)]
        if equation.primitive.name == "cond":
            inner = inner[-1:] if "branches_platforms" in equation.params else [max(inner)]
        total += times * sum(inner)
    return total


def _inner(params: dict) -> list[Any]:
    """The jaxprs that an equation calls."""
    values = [entry for value in params.values() for entry in (value if isinstance(value, tuple | list) else [value])]
    return [value for value in values if hasattr(value, "eqns") or hasattr(value, "jaxpr")]


def _dot_flops(equation: Any) -> float:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    summed = np.prod([left[axis] for axis in contracting], dtype=np.float64)
    return 2.0 * summed * np.prod(equation.outvars[0].aval.shape, dtype=np.float64)
