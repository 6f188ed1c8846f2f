"""The collectives of a compiled program, read from its text."""

import collections
import re

import numpy as np

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(
    rf"= (?P<shapes>.*?) (?P<kind>{'|'.join(COLLECTIVES)})(?:-start)?\(.*?channel_id=(?P<channel>\d+)(?P<rest>.*)"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8}


def collectives(text: str) -> dict[str, dict[str, float]]:
    """kind → {"count", "bytes", "in_loops"} of a compiled program's text, each collective once.

    bytes: of the results on one device.  in_loops: how many of them are in a loop's body, and run in each iteration.
    """
    kinds: dict[str, dict[str, float]] = {}
    seen = set()
    for line in text.splitlines():
        match = _COLLECTIVE.search(line)
        # An asynchronous collective appears several times in the text, always with its channel.
        if not match or match["channel"] in seen:
            continue
        seen.add(match["channel"])
        entry = kinds.setdefault(match["kind"], collections.Counter(count=0, bytes=0, in_loops=0))
        entry["count"] += 1
        entry["bytes"] += sum(array_bytes(kind, shape) for kind, shape in _SHAPE.findall(match["shapes"]))
        entry["in_loops"] += "while/body" in match["rest"]
    return {kind: dict(kinds[kind]) for kind in sorted(kinds)}


def array_bytes(kind: str, shape: str) -> int:
    """Bytes of a printed array type, as bf16 [8,128]; 0 for a kind that holds no numbers."""
    sizes = [int(size) for size in shape.split(",") if size]
    return _BYTES[kind] * int(np.prod(sizes, dtype=np.int64)) if kind in _BYTES else 0
