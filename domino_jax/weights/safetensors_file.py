"""Safetensors files: their headers at once, their tensors on request, and whether the values are finite."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from domino_jax.runtime.errors import DataError, first_line
from domino_jax.runtime.file_kinds import HEAD_BYTES, refuse_other_kind

# float8, float4 and the like are left out on purpose: they come with scales that a plain cast would drop
# (quantization.py).
FLOATS = ("F64", "F32", "F16", "BF16")
_PIECE = 1 << 20


class Stored(NamedTuple):
    """A tensor in a file.

    dtype: the type's name there: F32, BF16, I64, …  start, size: its bytes in the file.
    """

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A copy of the tensor, or of the part that `index` (one slice per leading axis) selects; no more is read."""
        with _refusals(self.path):
            if self.dtype == "F8_E4M3":  # safetensors 0.8 cannot give numpy this type
                return np.array(np.memmap(self.path, jnp.float8_e4m3fn, "r", self.start, self.shape)[index])
            with safetensors.safe_open(self.path, "numpy") as file:
                return file.get_slice(self.name)[index] if index else file.get_tensor(self.name)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Errors of the system and of safetensors become a DataError."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        problem = "cannot be read" if isinstance(error, OSError) else "is not a complete safetensors file"
        raise DataError(f"{path} {problem}: {first_line(error, with_class=False)}.") from None


def read_header(path: Path) -> dict[str, Stored]:
    """One file's tensors by name; DataError where sizes, offsets and types contradict each other."""
    with _refusals(path), path.open("rb") as file:
        refuse_other_kind(str(path), file.read(HEAD_BYTES))
        with safetensors.safe_open(path, "numpy"):  # refuses what contradicts itself
            file.seek(0)
            first = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(first - 8))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            tensors[name] = Stored(path, name, entry["dtype"], tuple(entry["shape"]), first + start, end - start)
    return tensors


def is_finite(array: np.ndarray) -> bool:
    """False iff a floating array holds NaN or an infinity; other types are always finite."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return True
    # An IEEE number is finite iff not all its exponent bits are set; four times faster than isfinite on bfloat16.
    # float8_e4m3fn has no infinity: numpy makes it NaN, the one number with all bits set but the sign.
    bits = f"u{array.dtype.itemsize}"
    exponent = np.array(np.inf, array.dtype).view(bits)
    flat = array.reshape(-1).view(bits)
    # In pieces, so that the comparison's intermediates stay small beside the tensor.
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    return not any(((piece & exponent) == exponent).any() for piece in pieces)
