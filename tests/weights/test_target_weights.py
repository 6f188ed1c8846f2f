"""The target's table of names: byte-identical both ways, and every disagreement one message."""

import dataclasses
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights import hf
from domino_jax.weights.target import Entry, load_target, save_target, target_config_dict, target_table
from tests.helpers.paths import GOLDEN, ROOT

SETS = ["tied_shift", "untied_noshift"]
EMBEDDING = "model.embed_tokens.weight"

# The public Qwen3 sizes: hidden, intermediate, layers, heads, tied
PUBLIC_SIZES = {
    "0.6B": (1024, 3072, 28, 16, True),
    "1.7B": (2048, 6144, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "14B": (5120, 17408, 40, 40, False),
    "32B": (5120, 25600, 64, 64, False),
}


def public_config(size: str) -> Qwen3Config:
    hidden, intermediate, layers, heads, tied = PUBLIC_SIZES[size]
    return Qwen3Config(151936, hidden, intermediate, layers, heads, 8, 128, 1e-6, 1e6, False, 40960, tied)


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / name / "target" / hf.SINGLE)


def folder_with(tmp_path: Path, name: str, tensors: dict[str, np.ndarray] | None = None, **config) -> Path:
    """A copy of a golden target with other tensors or other config keys."""
    folder = tmp_path / "model"
    folder.mkdir()
    raw = json.loads((GOLDEN / name / "target" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **config}))
    save_file(tensors if tensors is not None else tensors_of(name), folder / hf.SINGLE)
    return folder


def shape_tree(config: Qwen3Config):
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(Qwen3(config).init, jax.random.key(0), tokens)["params"]


@pytest.mark.parametrize("size", PUBLIC_SIZES)
def test_the_table_lists_exactly_the_models_parameters_at_every_public_size(size):
    config = dataclasses.replace(public_config(size), num_hidden_layers=2)  # the others repeat these
    leaves = jax.tree_util.tree_leaves_with_path(shape_tree(config))
    expected = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert {entry.path: entry.leaf_shape for entry in target_table(config)} == expected


def test_the_table_lists_the_biases_of_a_config_with_attention_bias():
    config = dataclasses.replace(public_config("0.6B"), attention_bias=True, num_hidden_layers=1)
    leaves = jax.tree_util.tree_leaves_with_path(shape_tree(config))
    table = target_table(config)
    assert {entry.path for entry in table} == {tuple(key.key for key in path) for path, _ in leaves}
    assert Entry("model.layers.0.self_attn.k_proj.bias", ("layers_0", "self_attn", "k_proj", "bias"), (1024,)) in table


@pytest.mark.parametrize("name", SETS)
def test_the_golden_targets_names_are_exactly_the_tables(name):
    config = Qwen3Config.from_dict(json.loads((GOLDEN / name / "target" / "config.json").read_text()))
    table = {entry.name: entry.shape for entry in target_table(config)}
    assert table == {key: array.shape for key, array in tensors_of(name).items()}


def test_matrices_are_transposed_and_vectors_and_the_embedding_are_not():
    _, params = load_target(GOLDEN / "untied_noshift" / "target", jnp.float32)
    stored = tensors_of("untied_noshift")
    layer = params["layers_1"]
    np.testing.assert_array_equal(params["embed_tokens"]["embedding"], stored[EMBEDDING])
    np.testing.assert_array_equal(params["lm_head"]["kernel"], stored["lm_head.weight"].T)
    np.testing.assert_array_equal(layer["mlp"]["down_proj"]["kernel"], stored["model.layers.1.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(
        layer["self_attn"]["q_norm"]["scale"], stored["model.layers.1.self_attn.q_norm.weight"]
    )


def test_loading_shows_its_progress_once_it_takes_long(monkeypatch, capsys):
    folder = GOLDEN / "tied_shift" / "target"
    load_target(folder, jnp.float32)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("domino_jax.weights.target.PATIENCE", 0.0)
    size = len(target_table(load_target(folder, jnp.float32)[0]))
    assert f"loading weights {size}/{size}" in capsys.readouterr().out


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


@pytest.mark.parametrize("name", SETS)
def test_the_written_config_reads_back_as_the_same_config(tmp_path, name):
    config, params = load_target(GOLDEN / name / "target", "bfloat16")
    save_target(tmp_path, config, params, token_ids={"eos_token_id": 257, "bos_token_id": 256})
    raw = hf.read_config(tmp_path)
    assert Qwen3Config.from_dict(raw) == config
    assert (raw["dtype"], raw["rope_theta"]) == ("bfloat16", raw["rope_parameters"]["rope_theta"])
    assert hf.stop_ids(tmp_path) == (257,)


def test_the_written_config_holds_every_key_that_transformers_gives_the_golden_one():
    raw = json.loads((GOLDEN / "tied_shift" / "target" / "config.json").read_text())
    ours = target_config_dict(Qwen3Config.from_dict(raw), "float32")
    of_the_caller = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
    assert set(raw) - set(ours) == of_the_caller
    different = {key for key in set(raw) & set(ours) if raw[key] != ours[key]}
    assert different <= {"max_window_layers"}  # without effect while use_sliding_window is false


def test_a_sharded_target_loads_as_the_single_file_does(tmp_path, monkeypatch):
    config, params = load_target(GOLDEN / "tied_shift" / "target", "float32")
    monkeypatch.setattr(hf, "SHARD_BYTES", 300_000)
    save_target(tmp_path, config, params, "float32")
    assert (tmp_path / hf.INDEX).is_file() and len(list(tmp_path.glob("model-*"))) > 3
    _, again = load_target(tmp_path, "float32")
    jax.tree.map(np.testing.assert_array_equal, params, again)


@pytest.mark.parametrize("form", ["one for all", "function", "tree"])
def test_a_sharding_is_taken_in_each_of_its_three_forms(form):
    source = GOLDEN / "untied_noshift" / "target"
    _, plain = load_target(source, "float32")
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("tensor"))
    forms = {"one for all": split, "function": lambda path, shape: split, "tree": jax.tree.map(lambda _: split, plain)}
    _, params = load_target(source, "float32", forms[form])
    assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {split}
    jax.tree.map(np.testing.assert_array_equal, plain, params)


SHARDED_LOAD = """
import collections, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from domino_jax.weights import hf
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
    root = ROOT
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_function_form_of_a_sharding_sees_path_and_parameter_shape():
    seen = {}
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def sharding(path, shape):
        seen[path] = shape
        return device

    load_target(GOLDEN / "untied_noshift" / "target", "float32", sharding)
    assert seen["lm_head", "kernel"] == (48, 300) and seen["layers_0", "mlp", "up_proj", "kernel"] == (48, 112)


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
    assert "model.layers.3.mlp.up_proj.weight I32 [160, 64] for [160, 64]" in message


def test_at_most_ten_names_are_listed(tmp_path):
    tensors = {key: array for key, array in tensors_of("tied_shift").items() if "layers.5" not in key}
    tensors |= {f"stray{i}": np.ones(1, np.float32) for i in range(20)}
    message = refused(folder_with(tmp_path, "tied_shift", tensors))
    assert "(11 missing, 20 unknown)" in message
    assert message.count("model.layers.5") + message.count("stray") == 10


def test_a_config_with_one_more_layer_than_the_file_is_refused(tmp_path):
    assert "(11 missing)" in refused(folder_with(tmp_path, "tied_shift", num_hidden_layers=7))


def test_a_missing_head_of_an_untied_config_is_refused(tmp_path):
    tensors = tensors_of("untied_noshift")
    del tensors["lm_head.weight"]
    message = refused(folder_with(tmp_path, "untied_noshift", tensors))
    assert "missing: lm_head.weight" in message and "tie_word_embeddings true" in message


def test_a_stored_head_that_equals_the_tied_embedding_is_accepted(tmp_path):
    tensors = tensors_of("tied_shift")
    _, params = load_target(
        folder_with(tmp_path, "tied_shift", {**tensors, "lm_head.weight": tensors[EMBEDDING]}), "float32"
    )
    assert "lm_head" not in params


@pytest.mark.parametrize("change", ["value", "shape"])
def test_a_stored_head_that_differs_from_the_tied_embedding_is_refused(tmp_path, change):
    tensors = tensors_of("tied_shift")
    head = tensors[EMBEDDING].copy()
    head[259, 63] += 1
    tensors["lm_head.weight"] = head if change == "value" else head[:-1].copy()
    assert "lm_head.weight differs from model.embed_tokens.weight" in refused(
        folder_with(tmp_path, "tied_shift", tensors)
    )


def test_rotary_buffers_of_old_writers_are_ignored(tmp_path):
    tensors = tensors_of("tied_shift")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    tensors["model.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    load_target(folder_with(tmp_path, "tied_shift", tensors), "float32")


def test_a_nan_in_the_weights_is_refused_by_name(tmp_path):
    tensors = tensors_of("tied_shift")
    tensors["model.layers.4.mlp.down_proj.weight"][3, 5] = np.nan
    assert "'model.layers.4.mlp.down_proj.weight' holds NaN" in refused(folder_with(tmp_path, "tied_shift", tensors))


def test_values_beyond_the_wanted_type_are_refused_by_name(tmp_path):
    tensors = tensors_of("tied_shift")
    tensors["model.norm.weight"] = np.full(64, 1e300)
    assert "'model.norm.weight' holds values beyond the range" in refused(folder_with(tmp_path, "tied_shift", tensors))


@pytest.mark.parametrize(
    "key, value",
    [
        ("vocab_size", 10**12),
        ("num_hidden_layers", 10**9),
        ("hidden_size", -1),
        ("rms_norm_eps", [1]),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", 10**400),
        ("rope_theta", -1),
        ("rope_theta", float("1e400")),
        ("max_position_embeddings", 0),
        ("max_position_embeddings", 1e308),
        ("tie_word_embeddings", "false"),
        ("model_type", "x" * 100_000),
        ("head_dim", list(range(100_000))),
    ],
)
def test_an_absurd_config_is_refused_before_the_weights_are_opened(tmp_path, monkeypatch, key, value):
    monkeypatch.setattr(hf, "open_tensors", lambda folder: pytest.fail("opened the weights"))
    assert len(refused(folder_with(tmp_path, "tied_shift", **{key: value}))) < 500


def test_a_missing_folder_is_a_usage_error_and_an_empty_one_a_data_error(tmp_path):
    with pytest.raises(DominoError) as missing:
        load_target(tmp_path / "nope", "float32")
    with pytest.raises(DataError) as empty:
        load_target(tmp_path, "float32")
    assert (missing.value.exit_code, empty.value.exit_code) == (2, 3)


@pytest.mark.parametrize("change", ["missing", "unknown", "misshaped"])
def test_parameters_that_are_not_the_configs_are_not_written(tmp_path, change):
    config, params = load_target(GOLDEN / "tied_shift" / "target", "float32")
    if change == "missing":
        del params["norm"]
    elif change == "unknown":
        params["lm_head"] = {"kernel": jnp.ones((64, 260))}
    else:
        params["norm"]["scale"] = jnp.ones(63)
    with pytest.raises(DataError, match=f"1 {change}"):
        save_target(tmp_path / "out", config, params)
    assert not (tmp_path / "out").exists()


def test_parameters_that_are_not_finite_are_not_written(tmp_path):
    config, params = load_target(GOLDEN / "tied_shift" / "target", "float32")
    params["norm"]["scale"] = params["norm"]["scale"].at[3].set(jnp.inf)
    with pytest.raises(DataError, match="'model.norm.weight' holds NaN or an infinity"):
        save_target(tmp_path, config, params)
    assert list(tmp_path.iterdir()) == []
