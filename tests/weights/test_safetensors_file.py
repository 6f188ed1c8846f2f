"""The safetensors format: everything the public library writes is read, everything outside the format is refused."""

import json
import random
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.safetensors_file import HEADER_LIMIT, Deferred, write_file

F32_PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def raw_file(path: Path, header: dict | bytes, data: bytes = b"\0" * 8) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(**changes) -> dict:
    return {"a": {**F32_PAIR, **changes}}


def message_of(error: pytest.ExceptionInfo, lines: int = 3) -> str:
    text = str(error.value)
    assert len(text.splitlines()) <= lines
    return text


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]
)
def test_every_supported_type_reads_back_what_the_public_library_wrote(tmp_path, dtype):
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    save_file({"a": array}, tmp_path / hf.SINGLE)
    tensors = hf.open_tensors(tmp_path)
    assert (list(tensors), tensors.shape("a"), len(tensors)) == (["a"], (2, 3), 1)
    np.testing.assert_array_equal(tensors.read("a"), array)
    assert tensors.read("a").dtype == array.dtype


def test_a_slice_of_a_tensor_is_read_alone(tmp_path):
    save_file({"a": np.arange(12, dtype=np.float32).reshape(3, 4)}, tmp_path / hf.SINGLE)
    np.testing.assert_array_equal(
        hf.open_tensors(tmp_path).read("a", (slice(1, 3), slice(0, 2))), np.array([[4, 5], [8, 9]], np.float32)
    )


def test_tensors_at_unaligned_offsets_are_read(tmp_path):
    raw_file(tmp_path / hf.SINGLE, json.dumps(entry()).encode() + b" ", np.array([1.5, -2.0], np.float32).tobytes())
    np.testing.assert_array_equal(hf.open_tensors(tmp_path).read("a"), np.array([1.5, -2.0], np.float32))


MALFORMED = {
    "empty file": (b"", "not a complete safetensors file"),
    "pickle bytes": (b"\x80\x04\x95" + b"\0" * 40, "not a complete safetensors file"),
    "header of 2^63 bytes": ((2**63).to_bytes(8, "little") + b"{}", "not a complete safetensors file"),
    "header longer than the file": ((100).to_bytes(8, "little") + b"{}", "not a complete safetensors file"),
    "header is no JSON": (b"\x04" + b"\0" * 7 + b"{a}}", "invalid JSON"),
    "header is a list": (b"\x02" + b"\0" * 7 + b"[]", "invalid type: sequence"),
}


@pytest.mark.parametrize("content, reason", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content, reason):
    (tmp_path / hf.SINGLE).write_bytes(content)
    with pytest.raises(DataError) as error:
        hf.open_tensors(tmp_path)
    assert reason in message_of(error)


BAD_HEADERS = {
    "truncated data": (entry(), b"\0" * 7, "file not fully covered"),
    "trailing bytes": (entry(), b"\0" * 9, "file not fully covered"),
    "overlap": ({**entry(), "b": {**F32_PAIR, "data_offsets": [4, 12]}}, b"\0" * 12, "invalid offset"),
    "hole": ({**entry(), "b": {**F32_PAIR, "data_offsets": [12, 20]}}, b"\0" * 20, "invalid offset"),
    "shape against offsets": (entry(shape=[3]), b"\0" * 8, "invalid shape"),
    "overflowing shape": (entry(shape=[2**62, 2**62]), b"\0" * 8, "overflow"),
    "size of 4001 digits": (
        b'{"a":{"dtype":"F32","shape":[1%s],"data_offsets":[0,8]}}' % (b"0" * 4000),
        b"",
        "out of range",
    ),
    "product of 8000 digits": (entry(shape=[10**4000, 10**4000]), b"\0" * 8, "out of range"),
    "offset of 4001 digits": (entry(data_offsets=[0, 10**4000]), b"\0" * 8, "out of range"),
    "negative size": (entry(shape=[-2]), b"\0" * 8, "expected usize"),
    "fractional size": (entry(shape=[2.0]), b"\0" * 8, "expected usize"),
    "too many axes": (entry(shape=[2] + [1] * 8), b"\0" * 8, "9 axes; at most 8"),
    "negative offset": (entry(data_offsets=[-8, 0]), b"\0" * 8, "expected usize"),
    "three offsets": (entry(data_offsets=[0, 4, 8]), b"\0" * 8, "expected 2 elements"),
    "unknown dtype": (entry(dtype="F4"), b"\0" * 8, "invalid shape, data type"),
    "dtype is no string": (entry(dtype=["F32"]), b"\0" * 8, "expected string"),
    "missing field": ({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8, "missing field"),
    "entry is no object": ({"a": 1}, b"", "expected struct"),
    "traversal name": ({"../../x": F32_PAIR}, b"\0" * 8, "'../../x'"),
    "name with a slash": ({"a/b": F32_PAIR}, b"\0" * 8, "'a/b'"),
    "name with a newline": ({"a\nb": F32_PAIR}, b"\0" * 8, r"'a\nb'"),
    "name of 257 characters": ({"a" * 257: F32_PAIR}, b"\0" * 8, "refused tensor name"),
    "empty name": ({"": F32_PAIR}, b"\0" * 8, "''"),
    "doubled name": (b'{"a":%s,"a":%s}' % ((json.dumps(F32_PAIR).encode(),) * 2), b"\0" * 8, "'a' twice"),
}


@pytest.mark.parametrize("header, data, reason", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_header_outside_the_format_is_refused(tmp_path, header, data, reason):
    raw_file(tmp_path / hf.SINGLE, header, data)
    with pytest.raises(DataError) as error:
        hf.open_tensors(tmp_path)
    assert reason in message_of(error)


def test_a_header_of_99_megabytes_is_refused_unread(tmp_path):
    with open(tmp_path / hf.SINGLE, "wb") as file:
        file.write((99_000_000).to_bytes(8, "little"))
        file.truncate(100_000_000)
    start = time.process_time()
    with pytest.raises(DataError, match="99000000 bytes; more than 16000000"):
        hf.open_tensors(tmp_path)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("doubled, reason", [(False, "file not fully covered"), (True, "'t0000000' twice")])
def test_a_header_of_16_megabytes_is_judged_in_seconds(tmp_path, doubled, reason):
    """A quarter of a million names; the doubled one stands first and last."""
    names = [b"t%07d" % number for number in range(HEADER_LIMIT // 62)]
    text = b",".join(b'"%s":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % name for name in names)
    text = b"{%s%s}" % (text, b"," + text[:59] if doubled else b"")
    assert 0.9 * HEADER_LIMIT < len(text) <= HEADER_LIMIT
    raw_file(tmp_path / hf.SINGLE, text, b"" if doubled else b"\0")
    start = time.process_time()
    with pytest.raises(DataError, match=reason):
        hf.open_tensors(tmp_path)
    assert time.process_time() - start < 20  # hours when each name is compared with all before it


def test_a_deeply_nested_header_is_refused(tmp_path):
    raw_file(tmp_path / hf.SINGLE, b'{"a":' * 200_000)
    with pytest.raises(DataError, match="recursion limit"):
        hf.open_tensors(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_nan_and_infinity_are_refused_naming_the_tensor(tmp_path, dtype, bad):
    array = np.ones((3, 4), np.float32)
    array[1, 2] = bad
    save_file({"fine": np.ones(2, np.float32), "spoilt": array.astype(dtype)}, tmp_path / hf.SINGLE)
    tensors = hf.open_tensors(tmp_path)
    tensors.read("fine")
    with pytest.raises(DataError, match="'spoilt' holds NaN or an infinity"):
        tensors.read("spoilt")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_largest_finite_values_are_accepted(tmp_path, dtype):
    array = np.array([jnp.finfo(dtype).max, jnp.finfo(dtype).min, jnp.finfo(dtype).tiny], dtype)
    save_file({"a": array}, tmp_path / hf.SINGLE)
    np.testing.assert_array_equal(hf.open_tensors(tmp_path).read("a"), array)


def test_a_file_cut_short_after_it_was_opened_is_a_data_error(tmp_path):
    save_file({"a": np.ones(5000, np.float32)}, tmp_path / hf.SINGLE)
    tensors = hf.open_tensors(tmp_path)
    (tmp_path / hf.SINGLE).write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read any more"):
        tensors.read("a")


def test_a_thousand_random_damages_give_a_data_error_or_a_tensor_and_nothing_else(tmp_path):
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, jnp.bfloat16)}, tmp_path / hf.SINGLE)
    whole = (tmp_path / hf.SINGLE).read_bytes()
    draw = random.Random(0)
    refused = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        (tmp_path / hf.SINGLE).write_bytes(damaged[: draw.choice([None, None, draw.randrange(len(whole))])])
        try:
            tensors = hf.open_tensors(tmp_path)
            for name in tensors:
                tensors.read(name)
        except DataError as error:
            assert len(str(error).splitlines()) <= 3
            refused += 1
    assert refused > 500


def test_a_tensor_that_is_not_as_announced_is_not_written(tmp_path):
    tensor = Deferred(np.dtype(np.float32), (3,), lambda: np.ones(2, np.float32))
    with pytest.raises(ValueError, match="announced"):
        write_file(tmp_path / "out", {"a": tensor})
