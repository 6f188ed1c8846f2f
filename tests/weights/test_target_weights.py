"""The target's table of names: byte-identical both ways, and every disagreement one message."""

import filecmp
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from assets.target_folder import save_target
from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.target import load_target
from tests.helpers.golden_files import SETS, raw_config, stored_tensors, write_model
from tests.helpers.paths import GOLDEN, ROOT

EMBEDDING = "model.embed_tokens.weight"


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return stored_tensors(name, "target")


def folder_with(tmp_path: Path, name: str, tensors: dict[str, np.ndarray] | None = None, **config) -> Path:
    """A copy of a golden target with other tensors or other config keys."""
    raw = {**raw_config(name, "target"), **config}
    return write_model(tmp_path / "model", raw, tensors_of(name) if tensors is None else tensors)


@pytest.mark.parametrize("name", SETS)
def test_a_float32_target_written_back_is_the_same_file(tmp_path, name):
    source = GOLDEN / name / "target"
    config, params = load_target(source, "float32")
    save_target(tmp_path, config, params, "float32")
    assert filecmp.cmp(source / hf.SINGLE, tmp_path / hf.SINGLE, shallow=False)


@pytest.mark.parametrize("through", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", SETS)
def test_a_bfloat16_target_keeps_its_bytes_whatever_type_it_is_loaded_as(tmp_path, name, through):
    source = folder_with(tmp_path, name, {key: a.astype(jnp.bfloat16) for key, a in tensors_of(name).items()})
    config, params = load_target(source, through)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(through)}
    save_target(tmp_path / "out", config, params)
    before, after = load_file(source / hf.SINGLE), load_file(tmp_path / "out" / hf.SINGLE)
    assert {key: array.tobytes() for key, array in after.items()} == {key: a.tobytes() for key, a in before.items()}


def test_a_sharded_target_loads_as_the_single_file_does(tmp_path):
    _, params = load_target(GOLDEN / "tied_shift" / "target", "float32")
    tensors = tensors_of("tied_shift")
    shards = {name: f"model-0000{number % 3 + 1}-of-00003.safetensors" for number, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, tmp_path / shard)
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "config.json").write_text(json.dumps(raw_config("tied_shift", "target")))
    _, again = load_target(tmp_path, "float32")
    jax.tree.map(np.testing.assert_array_equal, params, again)


SHARDED_LOAD = """
import collections, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from domino_jax.weights import hf, loading
from domino_jax.weights.target import load_target

read = collections.defaultdict(set)
plain_read = hf.Tensors.read
def record(self, name, index=()):
    array = plain_read(self, name, index)
    read[name].add(array.shape)
    return array

mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
def sharding(path, shape):
    return NamedSharding(mesh, P("fsdp", "tensor") if len(shape) == 2 else P("tensor"))

_, plain = load_target(SOURCE, "float32")
hf.Tensors.read = record
_, params = load_target(SOURCE, "float32", sharding)
jax.tree.map(np.testing.assert_array_equal, plain, params)
assert params["lm_head"]["kernel"].addressable_shards[0].data.shape == (24, 150)
assert read["lm_head.weight"] == {(150, 24)}, read["lm_head.weight"]
assert read["model.layers.0.mlp.up_proj.weight"] == {(56, 24)}
assert read["model.norm.weight"] == {(24,)}
"""


def test_on_four_devices_each_reads_only_its_quarter_of_a_matrix():
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    code = SHARDED_LOAD.replace("SOURCE", repr(str(GOLDEN / "untied_noshift" / "target")))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as error:
        load_target(folder, "float32")
    assert len(str(error.value).splitlines()) <= 5
    return str(error.value)


def test_missing_unknown_and_misshaped_tensors_are_one_message(tmp_path):
    tensors = tensors_of("tied_shift")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.extra.weight"] = np.ones(3, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((64, 160), np.float32)
    tensors["model.layers.3.mlp.up_proj.weight"] = np.ones((160, 64), np.int32)
    message = refused(folder_with(tmp_path, "tied_shift", tensors))
    assert "(1 missing, 1 unknown, 2 misshaped)" in message
    assert "missing: model.norm.weight" in message
    assert "unknown: model.layers.0.self_attn.extra.weight" in message
    assert "model.layers.2.mlp.up_proj.weight [64, 160] for [160, 64]" in message
    assert "model.layers.3.mlp.up_proj.weight I32 [160, 64] for floating [160, 64]" in message


def test_a_missing_head_of_an_untied_config_is_refused(tmp_path):
    tensors = tensors_of("untied_noshift")
    del tensors["lm_head.weight"]
    message = refused(folder_with(tmp_path, "untied_noshift", tensors))
    assert "missing: lm_head.weight" in message and "tie_word_embeddings" in message


@pytest.mark.parametrize("change", [None, "value", "shape"])
def test_a_stored_head_is_accepted_under_a_tied_embedding_only_if_it_equals_it(tmp_path, change):
    tensors = tensors_of("tied_shift")
    head = tensors[EMBEDDING].copy()
    head[259, 63] += change == "value"
    tensors["lm_head.weight"] = head[:-1].copy() if change == "shape" else head
    folder = folder_with(tmp_path, "tied_shift", tensors)
    if change:
        assert "lm_head.weight differs from model.embed_tokens.weight" in refused(folder)
    else:
        assert "lm_head" not in load_target(folder, "float32")[1]


@pytest.mark.parametrize("value, reason", [(np.nan, "holds NaN"), (1e300, "holds values beyond the range of float32")])
def test_a_value_that_is_not_finite_in_the_wanted_type_is_refused_by_name(tmp_path, value, reason):
    tensors = tensors_of("tied_shift")
    tensors["model.norm.weight"] = np.full(64, value)
    assert f"'model.norm.weight' {reason}" in refused(folder_with(tmp_path, "tied_shift", tensors))


@pytest.mark.parametrize(
    "key, value",
    [
        ("vocab_size", 10**12),
        ("rms_norm_eps", [1]),
        ("rope_theta", float("1e400")),
        ("max_position_embeddings", 0),
        ("tie_word_embeddings", "false"),
        ("head_dim", list(range(100_000))),
    ],
)
def test_an_absurd_config_is_refused_before_the_weights_are_opened(tmp_path, monkeypatch, key, value):
    monkeypatch.setattr(hf, "open_tensors", lambda folder: pytest.fail("opened the weights"))
    assert len(refused(folder_with(tmp_path, "tied_shift", **{key: value}))) < 500


def test_parameters_that_are_not_the_configs_or_not_finite_are_not_written(tmp_path):
    config, params = load_target(GOLDEN / "tied_shift" / "target", "float32")
    layers = {name: part for name, part in params.items() if name != "norm"}
    for wrong, named in (
        (layers, "norm/scale"),
        ({**params, "lm_head": {"kernel": jnp.ones((64, 260))}}, "lm_head/kernel"),
        ({**layers, "norm": {"scale": jnp.ones(63)}}, "norm/scale"),
        ({**layers, "norm": {"scale": jnp.full(64, jnp.inf)}}, "'model.norm.weight' holds NaN or an infinity"),
    ):
        with pytest.raises(DataError, match=named):
            save_target(tmp_path / "out", config, wrong)
    assert not (tmp_path / "out").exists()
