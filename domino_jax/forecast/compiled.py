"""The cost of a program, read from its jaxpr and from the compiled program: FLOPs, bytes, memory, collectives."""

import collections
import re
from typing import Any

import jax
import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(
    rf"= (?P<shapes>.*?) (?P<kind>{'|'.join(COLLECTIVES)})(?:-start)?\(.*?channel_id=(?P<channel>\d+)(?P<rest>.*)"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}


def product_flops(jaxpr: Any) -> float:
    """FLOPs of all matrix products of a (closed) jaxpr over all devices, loops by their length, and of nothing else.

    Work repeated in a backward pass counts again: this is what the program does, not what it has to. Of branches the
    most expensive counts: `jax.lax.platform_dependent` has one for each kind of device, and one of them runs.
    """
    jaxpr = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _dot_flops(equation)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        inner = [product_flops(inner) for inner in _inner(equation.params)]
        total += times * (max(inner) if equation.primitive.name == "cond" else sum(inner))
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


def collectives(text: str) -> dict[str, dict[str, float]]:
    """kind → {"count", "bytes", "in_loops"} of a compiled program's text, each collective once.

    bytes: of the results on one device.  in_loops: how many of them are in a loop's body, and run in each iteration.
    """
    found: dict[str, dict[str, float]] = {}
    seen = set()
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        # An asynchronous collective appears several times in the text, always with its channel.
        if not match or match["channel"] in seen:
            continue
        seen.add(match["channel"])
        entry = found.setdefault(match["kind"], collections.Counter(count=0, bytes=0, in_loops=0))
        entry["count"] += 1
        entry["bytes"] += sum(array_bytes(kind, shape) for kind, shape in _SHAPE.findall(match["shapes"]))
        entry["in_loops"] += "while/body" in match["rest"]
    return {kind: dict(found[kind]) for kind in sorted(found)}


def gathers_in_loops(text: str) -> list[tuple[int, ...]]:
    """The shapes that all-gathers in loop bodies give on one device, each gather once."""
    found: dict[str, tuple[int, ...]] = {}
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        if match and match["kind"] == "all-gather" and "while/body" in match["rest"]:
            # Of a pair of operand and result, as a start gives it, the result is the last.
            dims = _SHAPE.findall(match["shapes"])[-1][1]
            found[match["channel"]] = tuple(int(size) for size in dims.split(",") if size)
    return list(found.values())


def array_bytes(kind: str, shape: str) -> int:
    """Bytes of a printed array type, as bf16 [8,128]; 0 for a kind that holds no numbers."""
    sizes = [int(size) for size in shape.split(",") if size]
    return _BYTES[kind] * int(np.prod(sizes, dtype=np.int64)) if kind in _BYTES else 0


def memory(program: jax.stages.Compiled) -> dict[str, int]:
    """Bytes on one device: "arguments", "temporary", "output" (what is not an argument's memory again), "peak"."""
    found = program.memory_analysis()
    output = found.output_size_in_bytes - found.alias_size_in_bytes
    whole = found.argument_size_in_bytes + found.temp_size_in_bytes + output
    return {
        "arguments": found.argument_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
        "output": output,
        # Compilers that plan the whole life of each buffer say the peak; else all of it together bounds it.
        "peak": found.peak_memory_in_bytes or whole,
    }


def cost(program: jax.stages.Compiled) -> dict[str, float]:
    """The compiler's own figures of one device: "flops", "bytes_accessed", "seconds", those it gives.

    It counts a loop's body once, whatever its turns, and its seconds are an estimate; a negative one (the sentinel of
    some operation that it cannot judge) is left out.
    """
    found = program.cost_analysis() or {}
    names = {"flops": "flops", "bytes accessed": "bytes_accessed", "optimal_seconds": "seconds"}
    return {ours: float(found[name]) for name, ours in names.items() if name in found and found[name] > 0}
