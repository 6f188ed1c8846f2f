"""The drafter's public layout: 62 and 58 names, aliases, both places of every key, fit to the target, other layouts."""

import dataclasses
import filecmp
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from domino_jax.drafters.config import DrafterConfig
from domino_jax.drafters.drafter import Drafter
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.drafter import check_fits, drafter_table, load_drafter, refuse_other_layouts, save_drafter
from tests.helpers.paths import GOLDEN

SETS = ["tied_shift", "untied_noshift"]

# The public 8B drafter, with the keys where its config.json has them.
PUBLIC_8B = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "projector_type": "domino",
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    },
}


def golden_raw(name: str, part: str) -> dict:
    return json.loads((GOLDEN / name / part / "config.json").read_text())


def target_of(name: str) -> Qwen3Config:
    return Qwen3Config.from_dict(golden_raw(name, "target"))


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / name / "drafter" / hf.SINGLE)


def write(folder: Path, raw: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / hf.SINGLE)
    return folder


def public_shapes(hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    """The tensors of the public 8B drafter."""
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (4096, hidden),
        "self_attn.k_proj": (1024, hidden),
        "self_attn.v_proj": (1024, hidden),
        "self_attn.o_proj": (hidden, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    return {
        "fc.weight": (hidden, 5 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **{f"layers.{i}.{part}.weight": shape for i in range(5) for part, shape in layer.items()},
        "prefix_gru.weight_ih_l0": (3072, hidden),
        "prefix_gru.weight_hh_l0": (3072, 1024),
        "embed_proj.0.weight": (256, hidden + 1024),
        "embed_proj.2.weight": (151936, 256),
    }


@pytest.mark.parametrize(
    "hidden, intermediate, parameters", [(2560, 9728, 588.3e6), (4096, 12288, 1104.5e6)], ids=["4B", "8B"]
)
def test_a_public_domino_drafter_has_exactly_its_62_tensors(hidden, intermediate, parameters):
    config = DrafterConfig.from_dict({**PUBLIC_8B, "hidden_size": hidden, "intermediate_size": intermediate})
    table = {entry.name: entry.shape for entry in drafter_table(config)}
    assert len(table) == 62 and table == public_shapes(hidden, intermediate)
    assert sum(int(np.prod(shape)) for shape in table.values()) == pytest.approx(parameters, abs=1e5)


def test_a_public_dflash_drafter_has_exactly_58_tensors():
    raw = {**PUBLIC_8B, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}}
    table = {entry.name: entry.shape for entry in drafter_table(DrafterConfig.from_dict(raw))}
    head = ("prefix_gru", "embed_proj")
    expected = {key: shape for key, shape in public_shapes(4096, 12288).items() if not key.startswith(head)}
    assert len(table) == 58 and table == expected


@pytest.mark.parametrize("name", SETS)
def test_the_table_lists_exactly_the_modules_parameters(name):
    config = DrafterConfig.from_dict(golden_raw(name, "drafter"))
    length, width, slots = 8, config.hidden_size, config.block_size
    features = jnp.zeros((1, length, len(config.target_layer_ids) * width))
    blocks = jnp.zeros((1, 2, slots, width))
    anchors = jnp.zeros((1, 2), jnp.int32)
    tree = jax.eval_shape(Drafter(config).init, jax.random.key(0), features, blocks, anchors, anchors > 0, blocks)
    leaves = jax.tree_util.tree_leaves_with_path(tree["params"])
    expected = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert {entry.path: entry.leaf_shape for entry in drafter_table(config)} == expected


def test_the_heads_matrices_land_transposed_in_their_places():
    _, params = load_drafter(GOLDEN / "tied_shift" / "drafter", target_of("tied_shift"), "float32")
    stored, head = tensors_of("tied_shift"), params["head"]
    np.testing.assert_array_equal(head["gru"]["weight_ih"], stored["prefix_gru.weight_ih_l0"].T)
    np.testing.assert_array_equal(head["gru"]["weight_hh"], stored["prefix_gru.weight_hh_l0"].T)
    np.testing.assert_array_equal(head["down"]["kernel"], stored["embed_proj.0.weight"].T)
    np.testing.assert_array_equal(head["up"]["kernel"], stored["embed_proj.2.weight"].T)


@pytest.mark.parametrize("name", SETS)
def test_a_float32_drafter_written_back_is_the_same_file(tmp_path, name):
    config, params = load_drafter(GOLDEN / name / "drafter", target_of(name), "float32")
    save_drafter(tmp_path, config, params, "float32")
    assert filecmp.cmp(GOLDEN / name / "drafter" / hf.SINGLE, tmp_path / hf.SINGLE, shallow=False)


@pytest.mark.parametrize("through", ["bfloat16", "float32"])
@pytest.mark.parametrize("head", ["domino", "dflash"])
@pytest.mark.parametrize("name", SETS)
def test_export_import_export_is_byte_identical_in_bfloat16(tmp_path, name, head, through):
    config, params = load_drafter(GOLDEN / name / "drafter", target_of(name), "float32")
    if head == "dflash":
        del params["head"]
        config = dataclasses.replace(config, projector="dflash", emb_dim=0, gru_hidden_dim=0, pure_draft_prefix_len=0)
    save_drafter(tmp_path / "first", config, params)
    again, params = load_drafter(tmp_path / "first", target_of(name), through)
    save_drafter(tmp_path / "second", again, params)
    assert again == dataclasses.replace(config, layer_types=again.layer_types)
    names = ["config.json", hf.SINGLE]
    assert filecmp.cmpfiles(tmp_path / "first", tmp_path / "second", names, shallow=False) == (names, [], [])


def test_the_written_config_has_the_keys_of_the_public_one(tmp_path):
    config, params = load_drafter(GOLDEN / "tied_shift" / "drafter", target_of("tied_shift"), "float32")
    save_drafter(tmp_path, config, params)
    raw = hf.read_config(tmp_path)
    assert set(PUBLIC_8B) <= set(raw)
    assert raw["dflash_config"] == golden_raw("tied_shift", "drafter")["dflash_config"]
    assert (raw["architectures"], raw["dtype"]) == (["DFlashDraftModel"], "bfloat16")
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1e6


@pytest.mark.parametrize("moved", [["prefix_gru.weight_ih_l0"], ["prefix_gru", "embed_proj"]], ids=["one", "all"])
def test_the_old_logit_head_prefix_is_stripped(tmp_path, moved):
    tensors = {
        f"logit_head.{key}" if key.startswith(tuple(moved)) else key: array
        for key, array in tensors_of("tied_shift").items()
    }
    folder = write(tmp_path, golden_raw("tied_shift", "drafter"), tensors)
    _, params = load_drafter(folder, target_of("tied_shift"), "float32")
    _, expected = load_drafter(GOLDEN / "tied_shift" / "drafter", target_of("tied_shift"), "float32")
    jax.tree.map(np.testing.assert_array_equal, expected, params)


def test_a_tensor_under_both_its_names_is_refused(tmp_path):
    tensors = tensors_of("tied_shift")
    tensors["logit_head.embed_proj.0.weight"] = tensors["embed_proj.0.weight"]
    folder = write(tmp_path, golden_raw("tied_shift", "drafter"), tensors)
    with pytest.raises(DataError, match="1 twice") as error:
        load_drafter(folder, target_of("tied_shift"), "float32")
    assert "embed_proj.0.weight = logit_head.embed_proj.0.weight" in str(error.value)


def test_a_dflash_config_over_a_domino_file_is_refused(tmp_path):
    raw = golden_raw("tied_shift", "drafter")
    del raw["dflash_config"]["projector_type"]
    folder = write(tmp_path, raw, tensors_of("tied_shift"))
    with pytest.raises(DataError, match="4 unknown"):
        load_drafter(folder, target_of("tied_shift"), "float32")


# ---- both places of every key ----------------------------------------------------------------------------------------


def moved(raw: dict, **places: str) -> dict:
    """raw with each key at 'top', 'nested' or 'both'."""
    raw = {**raw, "dflash_config": dict(raw["dflash_config"])}
    nested = raw["dflash_config"]
    for key, place in places.items():
        value = raw.pop(key, None) if key in raw else None
        value = nested.pop(key, value)
        if place in ("top", "both"):
            raw[key] = value
        if place in ("nested", "both"):
            nested[key] = value
    return raw


@pytest.mark.parametrize("place", ["top", "nested", "both"])
@pytest.mark.parametrize(
    "key", ["block_size", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label", "projector_type"]
)
def test_a_key_is_read_at_top_level_in_dflash_config_or_in_both(key, place):
    raw = golden_raw("untied_noshift", "drafter")
    assert DrafterConfig.from_dict(moved(raw, **{key: place})) == DrafterConfig.from_dict(raw)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_rope_theta_is_read_in_either_place(rope):
    raw = {key: value for key, value in PUBLIC_8B.items() if key != "rope_theta"}
    assert DrafterConfig.from_dict({**raw, **rope}).rope_theta == 5e5


@pytest.mark.parametrize("extra", [{"rope_parameters": {"rope_theta": 5e5}}, {"emb_dim": 255}])
def test_two_places_that_disagree_are_refused(extra):
    with pytest.raises(DataError, match="make them equal"):
        DrafterConfig.from_dict({**PUBLIC_8B, **extra})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 1e308),
        ("block_size", 2**31),
        ("block_size", 2**30),
        ("block_size", "8"),
        ("num_target_layers", True),
    ],
)
def test_a_number_that_is_no_small_integer_is_refused(key, value):
    with pytest.raises(DataError, match=f"{key} .*(expected an integer|larger than)"):
        DrafterConfig.from_dict({**PUBLIC_8B, key: value})


@pytest.mark.parametrize(("key", "value"), [("mask_token_id", 0.5), ("target_layer_ids", [1, 2.5])])
def test_a_fraction_is_not_cut_to_an_integer(key, value):
    nested = {**PUBLIC_8B["dflash_config"], key: value}
    with pytest.raises(DataError, match=f"{key} .*expected an integer"):
        DrafterConfig.from_dict({**PUBLIC_8B, "dflash_config": nested})


def test_causal_v5_is_the_old_name_of_domino():
    raw = {**PUBLIC_8B, "dflash_config": {**PUBLIC_8B["dflash_config"], "projector_type": "causal_v5"}}
    assert DrafterConfig.from_dict(raw) == DrafterConfig.from_dict(PUBLIC_8B)


def test_a_missing_gru_width_is_the_rank():
    nested = {key: value for key, value in PUBLIC_8B["dflash_config"].items() if key != "gru_hidden_dim"}
    assert DrafterConfig.from_dict({**PUBLIC_8B, "dflash_config": nested}).gru_hidden_dim == 256


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids", "shift_label"])
def test_a_domino_config_without_a_key_that_is_never_guessed_names_it(key):
    nested = {name: value for name, value in PUBLIC_8B["dflash_config"].items() if name != key}
    with pytest.raises(DataError, match=key):
        DrafterConfig.from_dict({**PUBLIC_8B, "dflash_config": nested})


# ---- drafters that compute something else ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "top, nested, named",
    [
        ({}, {"projector_type": "dspark"}, "dflash_config.projector_type 'dspark'"),
        ({}, {"causal": True}, "dflash_config.causal True"),
        ({}, {"causal": False}, "dflash_config.causal False"),
        ({}, {"use_swa": True, "swa_window_size": 4}, "dflash_config.use_swa True"),
        ({}, {"attention_value_scale": 0.5}, "dflash_config.attention_value_scale 0.5"),
        ({}, {"attention_sink_bias": True}, "dflash_config.attention_sink_bias True"),
        ({}, {"final_logit_softcapping": 30.0}, "dflash_config.final_logit_softcapping 30.0"),
        ({}, {"conv_kernel_size": 2, "conv_group_size": 16}, "dflash_config.conv_kernel_size 2"),
        ({}, {"markov_rank": 12}, "dflash_config.markov_rank 12"),
        ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_dim": 64}}, {}, "rope_parameters.rope_dim 64"),
        ({"draft_vocab_size": 32000}, {}, "draft_vocab_size 32000 and vocab_size 151936"),
        ({"target_hidden_size": 5120}, {}, "target_hidden_size 5120 and hidden_size 4096"),
        ({"sample_from_anchor": False}, {}, "shift_label True and sample_from_anchor False"),
        ({"is_causal": "yes"}, {}, "is_causal = 'yes'"),
        ({}, {"shift_label": "false"}, "shift_label = 'false'"),
    ],
)
def test_a_key_that_changes_what_a_drafter_computes_is_refused_by_name(top, nested, named):
    raw = {**PUBLIC_8B, **top, "dflash_config": {**PUBLIC_8B["dflash_config"], **nested}}
    with pytest.raises(DataError, match=named) as error:
        DrafterConfig.from_dict(raw)
    assert len(str(error.value).splitlines()) <= 5


@pytest.mark.parametrize("place", ["top", "nested", "both"])
@pytest.mark.parametrize("shifted", [True, False])
def test_sample_from_anchor_decides_whether_a_plain_drafter_is_shifted(shifted, place):
    plain = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "sample_from_anchor": shifted}
    config = DrafterConfig.from_dict(moved({**PUBLIC_8B, "dflash_config": plain}, sample_from_anchor=place))
    assert config.shift_label is shifted and not config.has_head
    again = config.to_dict()
    stated = [raw.get("sample_from_anchor") for raw in (again, again["dflash_config"])]
    assert stated == ([True, True] if shifted else [None, None])
    assert DrafterConfig.from_dict(again).shift_label is shifted


def test_is_causal_false_is_not_an_absent_one():
    sliding = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True}
    for value, causal in ((None, True), (True, True), (False, False)):
        config = DrafterConfig.from_dict({**PUBLIC_8B, **sliding, "is_causal": value})
        assert (config.is_causal, config.causal(0)) == (value, causal)
    assert not DrafterConfig.from_dict(PUBLIC_8B).causal(0)


# ---- fit to the target -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target_change, values",
    [
        ({"hidden_size": 128}, ("hidden_size 64", "128")),
        ({"vocab_size": 300}, ("vocab_size 260", "300")),
        ({"num_hidden_layers": 7}, ("target layers 6", "7")),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(target_change, values):
    target = dataclasses.replace(target_of("tied_shift"), **target_change)
    with pytest.raises(DataError) as error:
        load_drafter(GOLDEN / "tied_shift" / "drafter", target, "float32")
    assert all(value in str(error.value) for value in values)


@pytest.mark.parametrize("mask", [260, -1])
def test_a_mask_token_outside_the_embedding_is_refused_with_both_values(mask):
    config = dataclasses.replace(DrafterConfig.from_dict(golden_raw("tied_shift", "drafter")), mask_token_id=mask)
    with pytest.raises(DataError, match=rf"mask_token_id {mask} .*260"):
        check_fits(config, target_of("tied_shift"))


@pytest.mark.parametrize("ids", [(1, 5), (1, 6), (-1, 1)])
def test_the_last_layer_and_those_beyond_cannot_be_tapped(ids):
    config = dataclasses.replace(DrafterConfig.from_dict(golden_raw("tied_shift", "drafter")), target_layer_ids=ids)
    with pytest.raises(DataError, match=r"target_layer_ids hold \[-?\d\], but the target has layers 0\.\.5"):
        check_fits(config, target_of("tied_shift"))


def test_the_layer_before_the_last_can_be_tapped():
    config = DrafterConfig.from_dict(golden_raw("tied_shift", "drafter"))
    check_fits(dataclasses.replace(config, target_layer_ids=(0, 4)), target_of("tied_shift"))


@pytest.mark.parametrize("change", [{"target_layer_ids": 3}, {"block_size": "big"}, {"mask_token_id": [1]}])
def test_a_value_of_the_wrong_kind_is_a_short_data_error(tmp_path, change):
    raw = golden_raw("tied_shift", "drafter")
    raw.pop("block_size", None)
    raw["dflash_config"] = {"block_size": 8, **raw["dflash_config"], **change}
    with pytest.raises(DataError) as error:
        load_drafter(write(tmp_path, raw, tensors_of("tied_shift")), target_of("tied_shift"), "float32")
    assert len(str(error.value).splitlines()) <= 3


def test_a_train_workdir_gives_its_exported_drafter(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 0}')  # the recipe of the run
    write(tmp_path / "export", golden_raw("tied_shift", "drafter"), tensors_of("tied_shift"))
    config, _ = load_drafter(tmp_path, target_of("tied_shift"), "float32")
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
    folder = write(tmp_path, DEEPSPEC, {"lm_head.weight": np.ones((2, 2), np.float32)})
    with pytest.raises(DataError, match="DeepSpec layout"):
        load_drafter(folder, target_of("tied_shift"), "float32")
