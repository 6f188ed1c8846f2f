"""The safetensors file format, read with distrust and written in slices.

A file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, and the tensors' bytes. The
public library accepts doubled names, names such as "../../x", NaN payloads and headers of 100 MB; a checkpoint may come
from anywhere, so the header is checked here, against limits, before anything else is read or allocated.
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

from domino_jax.runtime.errors import DataError, quote

# A 64-layer model's header has 0.1 MB. The limit bounds what a hostile file can make us parse.
HEADER_LIMIT = 16_000_000
NAME_LIMIT = 256
RANK_LIMIT = 8
SIZE_LIMIT = 1 << 63  # of an axis or an offset: an int of 4,000 digits is valid JSON, and no message could print it

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
    """Where one tensor lies. `begin` counts from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A tensor to be written whose bytes are made only when its turn comes, so that one at a time lies on the host."""

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
    """One file's header, {name: where it lies}. Raises DataError on anything the format does not allow."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length < 2 or 8 + length > size:
                raise DataError(
                    f"{path.name} is no whole safetensors file: {size} bytes cannot hold a header of {length}."
                )
            if length > HEADER_LIMIT:
                raise DataError(f"{path.name} names a header of {length} bytes; more than {HEADER_LIMIT} are refused.")
            text = file.read(length)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    header = parse_json(text, f"{path.name}: the header")
    header.pop("__metadata__", None)
    stored = {}
    spans = []
    for name, entry in header.items():
        code, shape, begin, end = _check_entry(path, name, entry)
        stored[name] = Stored(path, code, shape, 8 + length + begin)
        spans.append((begin, end, name))
    _check_spans(path, spans, size - 8 - length)
    return stored


def _check_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one header entry, each of the right kind and agreeing with one another."""
    if not name or len(name) > NAME_LIMIT or ".." in name or not name.isprintable() or set(name) & set("/\\"):
        raise DataError(
            f"{path.name}: refused tensor name {quote(name)}; names hold no '..', slashes or control characters."
        )
    where = f"{path.name}: tensor {quote(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise DataError(f"{where} needs exactly dtype, shape and data_offsets.")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise DataError(f"{where} has dtype {quote(code)}; supported are {', '.join(DTYPES)}.")
    if not _are_counts(shape) or len(shape) > RANK_LIMIT:
        raise DataError(f"{where} has shape {quote(shape)}; expected at most {RANK_LIMIT} sizes, none negative.")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise DataError(f"{where} has data_offsets {quote(offsets)}; expected two byte positions.")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[code].itemsize
    if end - begin != needed:
        raise DataError(f"{where} [{code} {shape}] needs {needed} bytes, but its data_offsets span {end - begin}.")
    return code, tuple(shape), begin, end


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < SIZE_LIMIT for value in values)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], size: int) -> None:
    """The tensors' bytes must fill the file from end to end: no overlap, no hole, nothing cut off or left over."""
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            kind = "overlaps the tensor before it" if begin < reached else "leaves a hole before it"
            raise DataError(f"{path.name}: tensor {quote(name)} starts at byte {begin}, not {reached}: it {kind}.")
        reached = end
    if reached != size:
        kind = "cut off" if reached > size else "followed by bytes of no tensor"
        raise DataError(
            f"{path.name}: the header describes {reached} bytes of data, the file has {size}: it is {kind}."
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
