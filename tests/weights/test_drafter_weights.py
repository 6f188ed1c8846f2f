"""The drafter's public layout: 62 and 58 names, aliases, both places of every key, fit to the target, other layouts."""

import dataclasses
import filecmp

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.drafters.config import DrafterConfig
from domino_jax.drafters.drafter import Drafter
from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.drafter import check_fits, drafter_table, load_drafter, refuse_other_layouts, save_drafter
from tests.helpers.golden_files import SETS, raw_config, stored_tensors, target_config, write_model
from tests.helpers.paths import GOLDEN
from tests.helpers.public_drafter import PUBLIC_8B, public_shapes

HEAD = ("prefix_gru", "embed_proj")


@pytest.mark.parametrize(
    "hidden, intermediate, parameters", [(2560, 9728, 588.3e6), (4096, 12288, 1104.5e6)], ids=["4B", "8B"]
)
def test_public_drafters_have_exactly_these_62_tensors_and_58_without_a_head(hidden, intermediate, parameters):
    raw = {**PUBLIC_8B, "hidden_size": hidden, "intermediate_size": intermediate}
    table = {entry.name: entry.shape for entry in drafter_table(DrafterConfig.from_dict(raw))}
    assert len(table) == 62 and table == public_shapes(raw)
    assert sum(int(np.prod(shape)) for shape in table.values()) == pytest.approx(parameters, abs=1e5)
    plain = {key: raw["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    backbone = {entry.name for entry in drafter_table(DrafterConfig.from_dict({**raw, "dflash_config": plain}))}
    assert len(backbone) == 58 and backbone == {name for name in table if not name.startswith(HEAD)}


@pytest.mark.parametrize("name", SETS)
def test_the_table_lists_exactly_the_modules_parameters(name):
    config = DrafterConfig.from_dict(raw_config(name, "drafter"))
    length, width, slots = 8, config.hidden_size, config.block_size
    features = jnp.zeros((1, length, len(config.target_layer_ids) * width))
    blocks = jnp.zeros((1, 2, slots, width))
    anchors = jnp.zeros((1, 2), jnp.int32)
    tree = jax.eval_shape(Drafter(config).init, jax.random.key(0), features, blocks, anchors, anchors > 0, blocks)
    leaves = jax.tree_util.tree_leaves_with_path(tree["params"])
    expected = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert {entry.path: entry.leaf_shape for entry in drafter_table(config)} == expected


@pytest.mark.parametrize("name", SETS)
def test_a_float32_drafter_written_back_is_the_same_file(tmp_path, name):
    config, params = load_drafter(GOLDEN / name / "drafter", target_config(name), "float32")
    save_drafter(tmp_path, config, params, "float32")
    assert filecmp.cmp(GOLDEN / name / "drafter" / hf.SINGLE, tmp_path / hf.SINGLE, shallow=False)


@pytest.mark.parametrize("through", ["bfloat16", "float32"])
@pytest.mark.parametrize("head", ["domino", "dflash"])
@pytest.mark.parametrize("name", SETS)
def test_export_import_export_is_byte_identical_in_bfloat16(tmp_path, name, head, through):
    config, params = load_drafter(GOLDEN / name / "drafter", target_config(name), "float32")
    if head == "dflash":
        del params["head"]
        config = dataclasses.replace(config, head="none", emb_dim=0, gru_hidden_dim=0, pure_draft_prefix_len=0)
    save_drafter(tmp_path / "first", config, params)
    again, params = load_drafter(tmp_path / "first", target_config(name), through)
    save_drafter(tmp_path / "second", again, params)
    assert again == dataclasses.replace(config, layer_types=again.layer_types)
    names = ["config.json", hf.SINGLE]
    assert filecmp.cmpfiles(tmp_path / "first", tmp_path / "second", names, shallow=False) == (names, [], [])


def test_the_written_config_has_the_keys_of_the_public_one(tmp_path):
    config, params = load_drafter(GOLDEN / "tied_shift" / "drafter", target_config("tied_shift"), "float32")
    save_drafter(tmp_path, config, params)
    raw = hf.read_config(tmp_path)
    assert set(PUBLIC_8B) <= set(raw)
    assert raw["dflash_config"] == raw_config("tied_shift", "drafter")["dflash_config"]
    assert (raw["architectures"], raw["dtype"]) == (["DFlashDraftModel"], "bfloat16")
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1e6


@pytest.mark.parametrize("moved", [["prefix_gru.weight_ih_l0"], HEAD], ids=["one", "all"])
def test_the_old_logit_head_prefix_is_stripped(tmp_path, moved):
    tensors = {
        f"logit_head.{key}" if key.startswith(tuple(moved)) else key: array
        for key, array in stored_tensors("tied_shift", "drafter").items()
    }
    folder = write_model(tmp_path, raw_config("tied_shift", "drafter"), tensors)
    _, params = load_drafter(folder, target_config("tied_shift"), "float32")
    _, expected = load_drafter(GOLDEN / "tied_shift" / "drafter", target_config("tied_shift"), "float32")
    jax.tree.map(np.testing.assert_array_equal, expected, params)


def test_a_tensor_under_both_its_names_is_refused(tmp_path):
    tensors = stored_tensors("tied_shift", "drafter")
    tensors["logit_head.embed_proj.0.weight"] = tensors["embed_proj.0.weight"]
    folder = write_model(tmp_path, raw_config("tied_shift", "drafter"), tensors)
    with pytest.raises(DataError, match="1 twice") as error:
        load_drafter(folder, target_config("tied_shift"), "float32")
    assert "embed_proj.0.weight = logit_head.embed_proj.0.weight" in str(error.value)


def test_a_dflash_config_over_a_domino_file_is_refused(tmp_path):
    raw = raw_config("tied_shift", "drafter")
    del raw["dflash_config"]["projector_type"]
    folder = write_model(tmp_path, raw, stored_tensors("tied_shift", "drafter"))
    with pytest.raises(DataError, match="4 unknown"):
        load_drafter(folder, target_config("tied_shift"), "float32")


# ---- fit to the target -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter, target, values",
    [
        ({}, {"hidden_size": 128}, "hidden_size 64.* 128"),
        ({}, {"vocab_size": 300}, "vocab_size 260.* 300"),
        ({}, {"num_hidden_layers": 7}, "target layers 6.* 7"),
        ({"mask_token_id": 260}, {}, "mask_token_id 260 .*260"),
        ({"mask_token_id": -1}, {}, "mask_token_id -1 .*260"),
        # The last layer's public hidden state is normed already.
        ({"target_layer_ids": (1, 5)}, {}, r"target_layer_ids hold \[5\], but the target has layers 0\.\.5"),
        ({"target_layer_ids": (1, 6)}, {}, r"target_layer_ids hold \[6\]"),
        ({"target_layer_ids": (-1, 1)}, {}, r"target_layer_ids hold \[-1\]"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_with_both_values(drafter, target, values):
    config = DrafterConfig.from_dict(raw_config("tied_shift", "drafter"))
    with pytest.raises(DataError, match=values):
        check_fits(dataclasses.replace(config, **drafter), dataclasses.replace(target_config("tied_shift"), **target))
    check_fits(dataclasses.replace(config, target_layer_ids=(0, 4)), target_config("tied_shift"))


def test_a_drafter_is_held_against_its_target_when_it_is_loaded():
    with pytest.raises(DataError, match="hidden_size"):
        target = dataclasses.replace(target_config("tied_shift"), hidden_size=128)
        load_drafter(GOLDEN / "tied_shift" / "drafter", target, "float32")


@pytest.mark.parametrize("change", [{"target_layer_ids": 3}, {"block_size": "big"}, {"mask_token_id": [1]}])
def test_a_value_of_the_wrong_kind_is_a_short_data_error(tmp_path, change):
    raw = raw_config("tied_shift", "drafter")
    raw.pop("block_size", None)
    raw["dflash_config"] = {"block_size": 8, **raw["dflash_config"], **change}
    with pytest.raises(DataError) as error:
        load_drafter(
            write_model(tmp_path, raw, stored_tensors("tied_shift", "drafter")), target_config("tied_shift"), "float32"
        )
    assert len(str(error.value).splitlines()) <= 3


def test_a_train_workdir_gives_its_exported_drafter(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 0}')  # the recipe of the run
    write_model(tmp_path / "export", raw_config("tied_shift", "drafter"), stored_tensors("tied_shift", "drafter"))
    config, _ = load_drafter(tmp_path, target_config("tied_shift"), "float32")
    assert config.block_size == 8


# ---- other projects' layouts -----------------------------------------------------------------------------------------

DEEPSPEC = {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 259, "target_layer_ids": [1, 3]}


@pytest.mark.parametrize(
    "raw, names, difference, remedy",
    [
        (DEEPSPEC, ["embed_tokens.weight"], "DeepSpec layout", "into dflash_config"),
        (
            PUBLIC_8B,
            ["embed_tokens.weight", "lm_head.weight"],
            "stores embed_tokens.weight, lm_head.weight",
            "drop them",
        ),
    ],
    ids=["DeepSpec", "stored embeddings"],
)
def test_another_projects_layout_is_refused_with_what_differs_and_how_to_convert(raw, names, difference, remedy):
    with pytest.raises(DataError) as error:
        refuse_other_layouts(raw, names)
    message = str(error.value)
    assert difference in message and "To convert" in message and remedy in message
    assert len(message.splitlines()) <= 5


@pytest.mark.parametrize("raw", [PUBLIC_8B, {}, {"architectures": None}, {"architectures": ["DominoDraftModel"]}])
def test_the_public_layout_is_not_taken_for_another(raw):
    refuse_other_layouts(raw, ["fc.weight", "logit_head.embed_proj.0.weight"])


def test_loading_names_the_other_layout_before_it_complains_about_keys(tmp_path):
    folder = write_model(tmp_path, DEEPSPEC, {"lm_head.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(DataError, match="DeepSpec layout"):
        load_drafter(folder, target_config("tied_shift"), "float32")
