"""Safetensors files read with distrust: what the public library accepts and this project does not is refused here.

The library refuses a header whose sizes, offsets and types contradict each other. It accepts doubled names, names such
as "../../x", NaN payloads and headers of 100 MB. A checkpoint may come from anywhere.
"""

import collections
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from domino_jax.runtime.errors import DataError, quote
from domino_jax.runtime.file_kinds import HEAD_BYTES, refuse_other_kind

# A 64-layer model's header has 0.1 MB. The limit bounds what a hostile file can make us parse.
HEADER_LIMIT = 16_000_000
NAME_LIMIT = 256
RANK_LIMIT = 8
FLOATS = ("F64", "F32", "F16", "BF16")
# float8, float4 and the like are left out on purpose: they come with scales that a plain cast would drop.
DTYPES = (*FLOATS, "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
_PIECE = 1 << 20


class Stored(NamedTuple):
    """A tensor in a file; dtype is the type's name there: F32, BF16, I64, …"""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of the tensor, or of the part that `index` (one slice per leading axis) selects; no more is read."""
        with _refusals(self.path), safetensors.safe_open(self.path, "numpy") as file:
            return file.get_slice(self.name)[index] if index else file.get_tensor(self.name)


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """Plain JSON → its object. Doubled keys, NaN and anything but an object raise DataError that starts with `what`."""

    def no_doubles(pairs):
        seen = dict(pairs)
        if len(seen) != len(pairs):
            double, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
            raise DataError(f"{what} holds {quote(double)} twice; the file is damaged or made to mislead.")
        return seen

    def no_constant(constant):
        raise DataError(f"{what} holds {constant}, which is not JSON.")

    try:
        parsed = json.loads(text, object_pairs_hook=no_doubles, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else quote(str(error))
        raise DataError(f"{what} is not valid JSON ({reason}); fetch or write it again.") from None
    if not isinstance(parsed, dict):
        raise DataError(f"{what} is a JSON {type(parsed).__name__}; an object was expected.")
    return parsed


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """What the system and safetensors refuse inside becomes a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except safetensors.SafetensorError as error:
        raise DataError(f"{path} is not a complete safetensors file: {str(error)[:200]}.") from None


def read_header(path: Path) -> dict[str, Stored]:
    """One file's tensors by name. Raises DataError on anything the format does not allow."""
    with _refusals(path), open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
        refuse_other_kind(str(path), head)
        length = int.from_bytes(head[:8], "little")
        file.seek(8)
        if HEADER_LIMIT < length < path.stat().st_size:
            raise DataError(f"{path} names a header of {length} bytes; more than {HEADER_LIMIT} are refused.")
        with safetensors.safe_open(path, "numpy"):  # refuses every size, offset and type that contradicts another
            header = parse_json(file.read(length), f"{path}: the header")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        _check_entry(path, name, entry)
    return {name: Stored(path, name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def _check_entry(path: Path, name: str, entry: Any) -> None:
    """What the public library allows and this project does not."""
    if not name or len(name) > NAME_LIMIT or ".." in name or not name.isprintable() or set(name) & set("/\\"):
        raise DataError(
            f"{path}: refused tensor name {quote(name)}; names hold no '..', slashes or control characters."
        )
    if entry["dtype"] not in DTYPES:
        raise DataError(
            f"{path}: tensor {quote(name)} has dtype {quote(entry['dtype'])}; supported are {', '.join(DTYPES)}."
        )
    if len(entry["shape"]) > RANK_LIMIT:
        raise DataError(
            f"{path}: tensor {quote(name)} has {len(entry['shape'])} axes; at most {RANK_LIMIT} are supported."
        )


def is_finite(array: np.ndarray) -> bool:
    """False iff a floating array holds NaN or an infinity; other types are always finite."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    # An IEEE number is finite iff not all its exponent bits are set; four times faster than isfinite on bfloat16.
    bits = f"u{array.dtype.itemsize}"
    exponent = np.array(np.inf, array.dtype).view(bits)
    flat = array.reshape(-1).view(bits)
    # In pieces, so that the comparison's intermediates stay small beside the tensor.
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    return not any(((piece & exponent) == exponent).any() for piece in pieces)
