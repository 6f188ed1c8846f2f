"""Targets in eight bits: public folders give transformers' logits, copies follow their formula, the rest is refused.

tests/golden/quantized has one random Qwen3 in three public layouts (tests/golden/README.md).
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from domino_jax.method.pair import Pair
from domino_jax.models.quantized import dequantized, is_quantized, quantize, tiled
from domino_jax.models.qwen3 import Qwen3
from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.loading import load_target as load
from domino_jax.weights.target import load_target, read_target_config, read_target_scheme, target_table
from tests.helpers.decoding_models import check_lossless, make_generator, random_drafter, random_prompts
from tests.helpers.golden_files import check_logits, write_model
from tests.helpers.models import GOLDEN

FOLDERS = GOLDEN / "quantized"
FORMS = {"fp8": "float8_e4m3fn", "float_quantized": "float8_e4m3fn", "int_quantized": "int8"}


BLOCK = {"weights__strategy": "block", "weights__block_structure": [128, 128]}


def config_of(form: str) -> dict:
    return json.loads((FOLDERS / form / "config.json").read_text())


def stored(folder) -> dict:
    """The tensors of a folder."""
    return {name: tensor.read() for name, tensor in hf.open_tensors(folder).items()}


def folder_with(tmp_path, form: str, **changes) -> str:
    """A copy of a golden folder with a changed quantization_config.

    changes: of its keys, "group__…" of the keys of its group, "weights__…" of that group's weights.
    """
    shutil.copytree(FOLDERS / form, tmp_path / "target")
    raw = config_of(form)
    for key, value in changes.items():
        place, _, name = key.rpartition("__")
        part = raw["quantization_config"]
        if place:
            group = part["config_groups"]["group_0"]
            part = group if place == "group" else group["weights"]
        part[name] = value
    (tmp_path / "target" / "config.json").write_text(json.dumps(raw))
    return str(tmp_path / "target")


@pytest.mark.parametrize("form", FORMS)
def test_a_public_folder_gives_the_logits_of_transformers_with_its_dequantized_weights(form):
    _, params = check_logits(FOLDERS, form)
    layer = params["layers_0"]
    assert layer["self_attn"]["q_proj"]["kernel"]["q"].dtype == FORMS[form]
    # What the folder leaves floating stays so: always the embedding, and the modules that it names.
    assert is_quantized(params["lm_head"]["kernel"]) == (form == "int_quantized")


@pytest.mark.long
@pytest.mark.parametrize("form", ["quantized/fp8", "quantized/int_quantized", "moe/fp8"])
def test_every_mode_gives_the_text_of_a_quantized_folder(form):
    config, params = load_target(GOLDEN / form, "float32")
    target = Qwen3(config)
    models = Pair(target, params, *random_drafter(target, layer_types=("full_attention",)))
    made = make_generator(models, batch_size=2)
    check_lossless(made, random_prompts(2), ("autoregressive", "draft"))


def test_a_copy_at_load_is_rounded_as_the_folder_stores_it_and_keeps_the_layers_that_its_name_leaves_out():
    """A bfloat16 target and a float32 one have the same copies."""
    folder = GOLDEN / "untied_noshift" / "target"
    plain, copied = (load(str(folder), "float32", quantize=quantize) for quantize in (None, "fp8"))
    kernel = plain.params["layers_0"]["mlp"]["up_proj"]["kernel"]
    expected = quantize(kernel, "float8_e4m3fn")
    for loaded in (copied, load(str(folder), "bfloat16", quantize="fp8")):
        jax.tree.map(np.testing.assert_array_equal, loaded.params["layers_0"]["mlp"]["up_proj"]["kernel"], expected)
    assert is_quantized(copied.params["lm_head"]["kernel"]) and not is_quantized(copied.params["embed_tokens"])
    layers = load(str(folder), "float32", quantize="int8_layers")
    assert not is_quantized(layers.params["lm_head"]["kernel"])
    np.testing.assert_array_equal(layers.params["lm_head"]["kernel"], plain.params["lm_head"]["kernel"])


@pytest.mark.parametrize(
    ("form", "changes", "named"),
    [
        ("fp8", {"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ("fp8", {"weight_block_size": [64, 64]}, "weight_block_size [64, 64]"),
        ("int_quantized", {"weights__num_bits": 4}, "weights.num_bits 4"),
        ("int_quantized", {"weights__strategy": "group", "weights__group_size": 128}, "weights.strategy 'group'"),
        ("float_quantized", {"weights__strategy": "tensor"}, "weights.strategy 'tensor'"),
        ("float_quantized", {**BLOCK, "weights__block_structure": [64, 64]}, "weights.block_structure [64, 64]"),
        ("int_quantized", BLOCK, "weights.strategy 'block'"),
        ("int_quantized", {"format": "float-quantized"}, "weights.type 'int'"),
        ("float_quantized", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme {'num_bits': 8}"),
        ("float_quantized", {"config_groups": {"group_0": "all"}}, "config_groups.group_0 'all'; expected an object"),
    ],
)
def test_another_scheme_is_refused_by_name_with_the_forms_that_work(tmp_path, form, changes, named):
    with pytest.raises(DataError) as error:
        load_target(folder_with(tmp_path, form, **changes), "float32")
    message = str(error.value)
    assert named in message and "Qwen/Qwen3-8B-FP8" in message and "target.quantize=int8" in message
    assert "target/config.json has quantization_config." in message and len(message.splitlines()) == 1


@pytest.mark.parametrize("form", ["quantized/fp8", "moe/fp8"])
def test_blocks_of_compressed_tensors_are_the_tiles_of_qwens_folders(tmp_path, form):
    """Under other names, and with scales in bfloat16."""
    raw, tensors = json.loads((GOLDEN / form / "config.json").read_text()), stored(GOLDEN / form)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].astype(jnp.bfloat16).astype(np.float32)
    tiles = write_model(tmp_path / "tiles", raw, tensors)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name).astype(jnp.bfloat16)
    section = config_of("float_quantized")["quantization_config"]
    section["ignore"] = ["lm_head", "re:.*mlp.gate$", *raw["quantization_config"].get("modules_to_not_convert", [])]
    weights = section["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": "block", "block_structure": [128, 128]}
    blocks = write_model(tmp_path / "blocks", raw | {"quantization_config": section}, tensors)
    params = [load_target(folder, "float32")[1] for folder in (tiles, blocks)]
    assert tiled(params[1]["layers_0"]["self_attn"]["q_proj"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, *params)


@pytest.mark.parametrize("form", ["float_quantized", "int_quantized"])
def test_the_naive_format_stores_the_same(tmp_path, form):
    folder = folder_with(tmp_path, form, format="naive-quantized", group__format="naive-quantized")
    params = [load_target(each, "float32")[1] for each in (folder, FOLDERS / form)]
    jax.tree.map(np.testing.assert_array_equal, *params)


@pytest.mark.parametrize("changes", [{"quantization": {"bits": 4}}, {"quantization_config": {"bits": 4}}])
def test_a_quantized_mlx_folder_is_refused_as_one(tmp_path, changes):
    folder = folder_with(tmp_path, "fp8")
    raw = {key: value for key, value in config_of("fp8").items() if key != "quantization_config"} | changes
    (tmp_path / "target" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DataError, match="config.json has quantization {'bits': 4}, as quantized MLX folders have"):
        load_target(folder, "float32")


@pytest.mark.parametrize("name", ["mlp.down_proj", "model.layers", "re:.*down_proj$"])
def test_modules_that_a_folder_leaves_floating_are_named_by_any_part_of_their_path(tmp_path, name):
    """And a folder may be "frozen", as the older llm-compressor wrote."""
    folder = folder_with(tmp_path, "int_quantized", ignore=["lm_head", name], quantization_status="frozen")
    scheme = read_target_scheme(folder)
    held = {entry.name.split(".")[-2] for entry in target_table(read_target_config(folder)) if scheme.holds(entry)}
    layers = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    assert held == (set() if name == "model.layers" else layers)


def test_scales_that_do_not_fit_and_matrices_that_are_not_quantized_are_named(tmp_path):
    folder = folder_with(tmp_path, "fp8")
    tensors = stored(FOLDERS / "fp8")
    name = "model.layers.0.self_attn.q_proj.weight"  # of two tiles
    scale = tensors[f"{name}_scale_inv"]
    floating = dequantized({"q": tensors[name].T, "scale": scale.T}).T
    changed = {f"{name}_scale_inv": (scale[:1], r" \[1, 1\] for "), name: (floating, " F32 .* for F8_E4M3 ")}
    for key, (value, said) in changed.items():
        save_file({**tensors, key: np.asarray(value)}, f"{folder}/model.safetensors")
        with pytest.raises(DataError, match=f"1 misshaped(.|\n)*{key}{said}"):
            load_target(folder, "float32")
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, f"{folder}/model.safetensors")
    with pytest.raises(DataError, match=f"1 missing(.|\n)*{name}_scale_inv"):
        load_target(folder, "float32")


OTHER_WRITERS = {  # {folder: (the end of a tensor's name, its other end or none, the reason)}
    "moe/every_layer": ("mlp.gate.weight", "", "the router .* is quantized .*target.quantize=int8"),
    "moe/some_layers": ("experts.0.gate_proj.weight", "experts.gate_up_proj", "is several matrices in one tensor"),
    "tied_shift/target": ("mlp.up_proj.weight", "", r"the matrix .*up_proj.* \(F8_E4M3\).*target.quantize=int8"),
    "tied_shift/drafter": ("mlp.up_proj.weight", "", "the matrix .* is quantized .*draft_weights=int8"),
}


@pytest.mark.parametrize("base", OTHER_WRITERS)
def test_tensors_of_other_writers_are_refused_by_what_they_are(tmp_path, base):
    end, other, reason = OTHER_WRITERS[base]
    tensors = stored(GOLDEN / base)
    name = next(name for name in tensors if name.endswith(end))
    small = np.asarray(quantize(jnp.asarray(tensors.pop(name)), "float8_e4m3fn")["q"])
    tensors[name.replace(end, other or end)] = small
    folder = write_model(tmp_path / "folder", json.loads((GOLDEN / base / "config.json").read_text()), tensors)
    with pytest.raises(DataError, match=f"folder: .*{reason}") as error:
        if "drafter" in base:
            load_drafter(folder, read_target_config(GOLDEN / "tied_shift" / "target"), "float32")
        else:
            load_target(folder, "float32")
    assert len(str(error.value).splitlines()) == 1


def test_a_quantized_folder_takes_no_second_rounding():
    with pytest.raises(DataError, match="quantized already, but target.quantize is int8; leave it out, or name the bf"):
        load_target(FOLDERS / "fp8", "float32", quantize="int8")


def test_a_drafter_that_inherits_the_key_of_its_target_is_read_by_its_tensors(tmp_path):
    shutil.copytree(GOLDEN / "tied_shift" / "drafter", tmp_path / "drafter")
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    raw["quantization_config"] = config_of("fp8")["quantization_config"]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(raw))
    target, _ = load_target(GOLDEN / "tied_shift" / "target", "float32")
    folders = (GOLDEN / "tied_shift" / "drafter", tmp_path / "drafter")
    jax.tree.map(np.testing.assert_array_equal, *(load_drafter(folder, target, "float32")[1] for folder in folders))
