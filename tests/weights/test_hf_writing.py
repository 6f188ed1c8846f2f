"""Writing Hugging Face folders: readable by the public library, whole or not at all, nothing old is left."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights import hf


def test_what_is_written_opens_in_the_public_library_with_the_public_metadata(tmp_path):
    tensors = {"b": np.ones((2, 3), jnp.bfloat16), "a": np.zeros(4, np.float32), "c": np.array(7, np.int64)}
    hf.write_folder(tmp_path, tensors, {"model_type": "qwen3"}, {"generation_config.json": {"eos_token_id": 1}})
    back = load_file(tmp_path / hf.SINGLE)
    assert {name: (array.dtype, array.shape) for name, array in back.items()} == {
        name: (array.dtype, array.shape) for name, array in tensors.items()
    }
    assert all(np.array_equal(back[name], tensors[name]) for name in tensors)
    with safetensors.safe_open(tmp_path / hf.SINGLE, "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert hf.read_json(tmp_path, "config.json") == {"model_type": "qwen3"}
    assert hf.stop_ids(tmp_path) == (1,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "generation_config.json", hf.SINGLE]


def test_rewriting_a_sharded_folder_leaves_no_old_weights(tmp_path):
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": {"b": "model-00001-of-00001.safetensors"}}))
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "model-00001-of-00001.safetensors")
    hf.write_folder(tmp_path, {"a": np.ones(5, np.float32)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", hf.SINGLE]


def test_a_writing_that_fails_leaves_the_old_folder_whole_and_no_litter(tmp_path):
    hf.write_folder(tmp_path, {"a": np.ones(2, np.float32)}, {"version": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError, match="'b' holds NaN"):
        hf.write_folder(tmp_path, {"a": np.ones(2, np.float32), "b": np.full(2, np.nan, np.float32)}, {"version": 2})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_next_writing_removes_what_a_killed_one_left_and_nothing_else(tmp_path):
    for name in (".model.safetensors.123.tmp", "tokenizer.json", "notes.tmp"):
        (tmp_path / name).write_text("")
    hf.write_folder(tmp_path, {"a": np.ones(2, np.float32)}, {})
    names = ["config.json", hf.SINGLE, "notes.tmp", "tokenizer.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DominoError) as error:
            hf.write_folder(folder, {"a": np.ones(2, np.float32)}, {})
        assert error.value.exit_code == 2
