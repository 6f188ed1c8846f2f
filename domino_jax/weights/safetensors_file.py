"""The safetensors file format, read with distrust and written in slices.

A file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, and the tensors' bytes. The
public library checks that these fit together, but accepts doubled names, names such as "../../x", NaN payloads and
headers of 100 MB. A checkpoint may come from anywhere, so these are refused here.
"""

import collections
import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from domino_jax.runtime.errors import DataError, quote

# A 64-layer model's header has 0.1 MB. The limit bounds what a hostile file can make us parse.
HEADER_LIMIT = 16_000_000
NAME_LIMIT = 256
RANK_LIMIT = 8

# float8, float4 and the like are left out on purpose: they come with scales that a plain cast would drop.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
FLOATS = ("F64", "F32", "F16", "BF16")
_CODES = {dtype: code for code, dtype in DTYPES.items()}
# An IEEE number is infinite or NaN iff all its exponent bits are set; four times faster than isfinite on bfloat16.
_EXPONENT = {
    DTYPES["F64"]: (np.uint64, 0x7FF0_0000_0000_0000),
    DTYPES["F32"]: (np.uint32, 0x7F80_0000),
    DTYPES["F16"]: (np.uint16, 0x7C00),
    DTYPES["BF16"]: (np.uint16, 0x7F80),
}
_PIECE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor is stored. `begin` counts from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A tensor to be written whose bytes are made when it is written, so that the host holds one tensor at a time."""

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """Plain JSON → its object. Doubled keys, NaN and anything but an object raise DataError that starts with `what`."""

    def no_doubles(pairs):
        seen = dict(pairs)
        if len(seen) != len(pairs):
            counts = collections.Counter(name for name, _ in pairs)
            double = next(name for name, count in counts.items() if count > 1)
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


def read_header(path: Path) -> dict[str, Stored]:
    """One file's header, {name: where it is stored}. Raises DataError on anything the format does not allow."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if HEADER_LIMIT < length < path.stat().st_size:
                raise DataError(f"{path.name} names a header of {length} bytes; more than {HEADER_LIMIT} are refused.")
            with safetensors.safe_open(path, "numpy"):  # refuses every size, offset and type that contradicts another
                text = file.read(length)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except safetensors.SafetensorError as error:
        raise DataError(f"{path.name} is not a complete safetensors file: {str(error)[:200]}.") from None
    header = parse_json(text, f"{path.name}: the header")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        _check_entry(path, name, entry)
    return {
        name: Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _check_entry(path: Path, name: str, entry: Any) -> None:
    """What the public library allows and this project does not."""
    if not name or len(name) > NAME_LIMIT or ".." in name or not name.isprintable() or set(name) & set("/\\"):
        raise DataError(
            f"{path.name}: refused tensor name {quote(name)}; names hold no '..', slashes or control characters."
        )
    if entry["dtype"] not in DTYPES:
        raise DataError(
            f"{path.name}: tensor {quote(name)} has dtype {quote(entry['dtype'])}; supported are {', '.join(DTYPES)}."
        )
    if len(entry["shape"]) > RANK_LIMIT:
        raise DataError(
            f"{path.name}: tensor {quote(name)} has {len(entry['shape'])} axes; at most {RANK_LIMIT} are supported."
        )


def read_slice(stored: Stored, index: tuple[slice, ...] = ()) -> np.ndarray:
    """Copies a tensor, or the part that `index` (one slice per leading axis) selects, out of the file.

    The file is mapped, not read, so a slice touches no more of it than it needs.
    """
    dtype = DTYPES[stored.dtype]
    if 0 in stored.shape:
        return np.empty(stored.shape, dtype)[index]
    # Mapped as bytes: offsets in the file need not be aligned to the type.
    try:
        raw = np.memmap(stored.path, np.uint8, "r", stored.begin, (math.prod(stored.shape) * dtype.itemsize,))
    except (OSError, ValueError) as error:
        raise DataError(f"{stored.path} cannot be read any more ({quote(str(error))}).") from None
    return np.array(np.asarray(raw).view(dtype).reshape(stored.shape)[index])


def is_finite(array: np.ndarray) -> bool:
    """False iff a floating array holds NaN or an infinity; other types are always finite."""
    if array.dtype not in _EXPONENT:
        return True
    bits, exponent = _EXPONENT[array.dtype]
    flat = array.reshape(-1).view(bits)
    # In pieces, so that the comparison's intermediates stay small beside the tensor.
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    return not any(((piece & bits(exponent)) == bits(exponent)).any() for piece in pieces)


def write_file(path: Path, tensors: Mapping[str, Deferred]) -> None:
    """Writes one file, names sorted, header padded to 8: what the public library writes for tensors of one type."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = sorted(tensors)
    position = 0
    for name in names:
        tensor = tensors[name]
        offsets = [position, position + tensor.nbytes]
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            array = np.asarray(tensors[name].make(), order="C")
            if array.shape != tensors[name].shape or array.dtype != tensors[name].dtype:
                raise ValueError(f"{name} was announced as {tensors[name]} but is {array.dtype} {array.shape}")
            if not is_finite(array):
                raise DataError(f"tensor {quote(name)} holds NaN or an infinity; it is not written.")
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
