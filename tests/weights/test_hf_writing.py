"""Writing Hugging Face folders: readable by the public library, whole or not at all, nothing old is left."""

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file

from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf


def test_what_is_written_opens_in_the_public_library_with_the_public_metadata(tmp_path):
    matrix = np.arange(6, dtype=np.float32).reshape(3, 2)
    tensors = {"b": matrix.T.astype(jnp.bfloat16), "a": matrix.T, "c": np.array(7, np.int64), "d": matrix[::2, 1:]}
    hf.write_folder(tmp_path, tensors, {"model_type": "qwen3"})
    back = load_file(tmp_path / hf.SINGLE)
    assert {name: (array.dtype, array.shape) for name, array in back.items()} == {
        name: (array.dtype, array.shape) for name, array in tensors.items()
    }
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(tmp_path / hf.SINGLE, "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert hf.read_json(tmp_path, "config.json") == {"model_type": "qwen3"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", hf.SINGLE]


def test_a_writing_that_fails_leaves_the_old_folder_whole_and_no_litter(tmp_path):
    hf.write_folder(tmp_path, {"a": np.ones(2, np.float32)}, {"version": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match="'b' holds NaN"):
        hf.write_folder(tmp_path, {"a": np.ones(2, np.float32), "b": np.full(2, np.nan, np.float32)}, {"version": 2})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
