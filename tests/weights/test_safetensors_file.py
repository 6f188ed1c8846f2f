"""Safetensors files: what the public library writes is read, and what is damaged or not finite is refused."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf


def sized(header: dict | bytes, data: bytes = b"\0" * 8) -> bytes:
    """A file of this header and these bytes of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "int8", "bool"])
def test_a_tensor_and_a_slice_of_it_are_what_the_public_library_wrote(tmp_path, dtype):
    array = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0]]).astype(dtype)
    save_file({"a": array}, tmp_path / hf.SINGLE)
    tensors = hf.open_tensors(tmp_path)
    assert (list(tensors), tensors["a"].shape) == (["a"], (3, 3))
    whole, part = tensors.read("a"), tensors.read("a", (slice(1, 3), slice(0, 2)))
    np.testing.assert_array_equal(whole, array)
    np.testing.assert_array_equal(part, array[1:, :2])
    assert whole.dtype == part.dtype == array.dtype


ENTRY = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
REFUSED = {  # safetensors judges; here its errors become messages
    "pickle bytes": (b"\x80\x04\x95" + b"\0" * 40, "not a complete safetensors file"),
    "header is no JSON": (sized(b"{a}}"), "invalid JSON"),
    "header nested deep": (sized(b'{"a":' * 200_000), "recursion limit"),
    "truncated data": (sized(ENTRY, b"\0" * 7), "file not fully covered"),
}


@pytest.mark.parametrize("content, reason", REFUSED.values(), ids=REFUSED.keys())
def test_a_file_outside_the_format_is_refused(tmp_path, content, reason):
    (tmp_path / hf.SINGLE).write_bytes(content)
    with pytest.raises(DataError) as error:
        hf.open_tensors(tmp_path)
    assert reason in str(error.value) and len(str(error.value).splitlines()) <= 3
    assert str(tmp_path / hf.SINGLE) in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nan_and_infinity_are_refused_naming_the_tensor_and_the_largest_values_are_read(tmp_path, dtype):
    limits = jnp.finfo(dtype)
    fine = np.array([[limits.max, limits.min, limits.tiny], [0, 1, -1]], dtype)
    bad = {name: fine.copy() for name in ("nan", "inf", "-inf")}
    for name, array in bad.items():
        array[1, 2] = float(name)
    save_file({"fine": fine, **bad}, tmp_path / hf.SINGLE)
    tensors = hf.open_tensors(tmp_path)
    np.testing.assert_array_equal(tensors.read("fine"), fine)
    for name in bad:
        with pytest.raises(DataError, match=f"'{name}' holds NaN or an infinity"):
            tensors.read(name)
