"""The drafter's public layout: 62 and 58 names, aliases, both places of every key, fit to the target, other layouts."""

import dataclasses
import filecmp

import jax
import numpy as np
import pytest

from domino_jax.method.drafters import parse_config
from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.drafter import drafter_table, load_drafter, save_drafter
from domino_jax.weights.fit import check_fits
from tests.helpers.golden_files import SETS, folder_of, raw_config, stored_tensors, target_config, write_model
from tests.helpers.models import MARKOV_SETS
from tests.helpers.paths import GOLDEN
from tests.helpers.public_drafter import PUBLIC_8B, public_shapes, without_head

HEAD = ("prefix_gru", "embed_proj")
TARGET = target_config("tied_shift")


@pytest.mark.parametrize(
    "hidden, intermediate, parameters", [(2560, 9728, 588.3e6), (4096, 12288, 1104.5e6)], ids=["4B", "8B"]
)
def test_public_drafters_have_exactly_these_62_tensors_and_58_without_a_head(hidden, intermediate, parameters):
    raw = {**PUBLIC_8B, "hidden_size": hidden, "intermediate_size": intermediate}
    table = {entry.name: entry.shape for entry in drafter_table(parse_config(raw))}
    assert len(table) == 62 and table == public_shapes(raw)
    assert sum(int(np.prod(shape)) for shape in table.values()) == pytest.approx(parameters, abs=1e5)
    plain = {key: raw["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    backbone = {entry.name for entry in drafter_table(parse_config({**raw, "dflash_config": plain}))}
    assert len(backbone) == 58 and backbone == {name for name in table if not name.startswith(HEAD)}


@pytest.mark.parametrize("name", (*SETS, *MARKOV_SETS, "dflash2"))
def test_a_float32_drafter_written_back_is_the_same_file(tmp_path, name):
    config, params = load_drafter(GOLDEN / name / "drafter", target_config(name), "float32")
    save_drafter(tmp_path, config, params, "float32")
    assert filecmp.cmp(GOLDEN / name / "drafter" / hf.SINGLE, tmp_path / hf.SINGLE, shallow=False)


@pytest.mark.parametrize("through", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*SETS, "plain", *MARKOV_SETS, "dflash2", "eagle3"])
def test_export_import_export_is_byte_identical_in_bfloat16(tmp_path, name, through):
    folder = "tied_shift" if name == "plain" else name
    config, params = load_drafter(GOLDEN / folder / "drafter", target_config(folder), "float32")
    if name == "plain":
        del params["head"]
        config = without_head(config)
    save_drafter(tmp_path / "first", config, params)
    again, params = load_drafter(tmp_path / "first", target_config(folder), through)
    save_drafter(tmp_path / "second", again, params)
    assert again.to_dict() == config.to_dict()
    names = ["config.json", hf.SINGLE]
    assert filecmp.cmpfiles(tmp_path / "first", tmp_path / "second", names, shallow=False) == (names, [], [])


@pytest.mark.parametrize(
    ("name", "moved"), [("tied_shift", "prefix_gru.weight_ih_l0"), ("tied_shift", HEAD), ("markov_rnn", "markov_head.")]
)
def test_the_old_logit_head_prefix_is_stripped(tmp_path, name, moved):
    stored = stored_tensors(name, "drafter").items()
    tensors = {f"logit_head.{key}" if key.startswith(moved) else key: array for key, array in stored}
    folder = write_model(tmp_path, raw_config(name, "drafter"), tensors)
    _, params = load_drafter(folder, target_config(name), "float32")
    _, expected = load_drafter(GOLDEN / name / "drafter", target_config(name), "float32")
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
        ({}, {"num_hidden_layers": 7}, "target layers 6.* 7"),
        # The last layer's public hidden state is normed already.
        ({"target_layer_ids": (1, 5)}, {}, r"target_layer_ids hold \[5\], but the target has layers 0\.\.5"),
        ({"target_layer_ids": (-1, 1)}, {}, r"target_layer_ids hold \[-1\]"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_with_both_values(drafter, target, values):
    config = parse_config(raw_config("tied_shift", "drafter"))
    with pytest.raises(DataError, match=values):
        check_fits(dataclasses.replace(config, **drafter), dataclasses.replace(target_config("tied_shift"), **target))
    check_fits(dataclasses.replace(config, target_layer_ids=(0, 4)), target_config("tied_shift"))


def test_a_train_workdir_gives_its_exported_drafter(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 0}')  # the recipe of the run
    write_model(tmp_path / "export", raw_config("tied_shift", "drafter"), stored_tensors("tied_shift", "drafter"))
    assert load_drafter(tmp_path, target_config("tied_shift"), "float32")[0].block_size == 8


def test_copies_of_the_targets_embeddings_are_compared_and_left_out(tmp_path):
    own = stored_tensors("tied_shift", "target")["model.embed_tokens.weight"]
    raw, tensors = raw_config("tied_shift", "drafter"), stored_tensors("tied_shift", "drafter")
    path = folder_of("tied_shift", "target")
    folder = write_model(tmp_path / "same", raw, tensors | {"embed_tokens.weight": own, "lm_head.weight": own})
    config, _ = load_drafter(folder, TARGET, "float32", target_path=path)
    assert config == load_drafter(GOLDEN / "tied_shift" / "drafter", TARGET, "float32")[0]
    folder = write_model(tmp_path / "other", raw, tensors | {"embed_tokens.weight": own + np.ones_like(own)})
    with pytest.raises(DataError, match="embed_tokens.weight differs from the target's"):
        load_drafter(folder, TARGET, "float32", target_path=path)


# ---- other projects' layouts -----------------------------------------------------------------------------------------


def deepspec_folder(tmp_path, **changes):
    """The vanilla drafter as DeepSpec writes it: flat keys, and copies of the target's embedding as both matrices."""
    raw = raw_config("markov_vanilla", "drafter")
    nested = raw.pop("dflash_config")
    del nested["projector_type"], nested["attention_mode"]
    embedding = stored_tensors("markov_vanilla", "target")["model.embed_tokens.weight"]
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": embedding, **changes}
    tensors = {**stored_tensors("markov_vanilla", "drafter"), **copies}
    return write_model(tmp_path, {**raw, **nested, "architectures": ["Qwen3DSparkModel"]}, tensors)


def test_deepspecs_files_are_read_when_their_embeddings_are_the_targets(tmp_path):
    target, path = target_config("markov_vanilla"), folder_of("markov_vanilla", "target")
    config, params = load_drafter(deepspec_folder(tmp_path), target, "float32", target_path=path)
    expected, tensors = load_drafter(GOLDEN / "markov_vanilla" / "drafter", target, "float32")
    assert config == expected
    jax.tree.map(np.testing.assert_array_equal, params, tensors)


def nemos_config(**causal: bool) -> dict:
    """config.json as NeMo AutoModel 0.7.0 builds it: the target's keys with those of the draft over them."""
    drafter = raw_config("tied_shift", "drafter")
    widths = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")  # the target's own there
    same = {key: drafter[key] for key in (*widths, "num_hidden_layers", "num_target_layers", "block_size")}
    return raw_config("tied_shift", "target") | {
        **same,
        "architectures": ["Qwen3DFlashDraftModel"],
        "layer_types": ["full_attention"] * drafter["num_hidden_layers"],
        "max_window_layers": drafter["num_hidden_layers"],
        "dflash_config": drafter["dflash_config"] | causal,
    }


@pytest.mark.parametrize("head", ["domino", "none"])
@pytest.mark.parametrize("causal", [{}, {"causal": True}], ids=["DFlash", "JetSpec"])
def test_drafters_of_nemo_are_read(tmp_path, head, causal):
    """They have one class there, whatever their head and mask."""
    raw, tensors = nemos_config(**causal), stored_tensors("tied_shift", "drafter")
    if head == "none":
        stated = ("mask_token_id", "target_layer_ids", "causal")
        raw["dflash_config"] = {key: value for key, value in raw["dflash_config"].items() if key in stated}
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(HEAD)}
    config, params = load_drafter(write_model(tmp_path, raw, tensors), TARGET, "float32")
    public, expected = load_drafter(GOLDEN / "tied_shift" / "drafter", TARGET, "float32")
    assert (config.head, config.shift_label, config.is_causal) == (head, head == "domino", causal.get("causal"))
    assert (config.target_layer_ids, config.block_size) == (public.target_layer_ids, public.block_size)
    jax.tree.map(np.testing.assert_array_equal, params, {part: expected[part] for part in params})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"markov_head_type": "gated"}, "markov_head.gate_proj"),
        ({"markov_rank": 8}, r"markov_head.markov_w1.weight \[260, 16\] for \[260, 8\]"),
        ({"enable_confidence_head": True}, "missing: confidence_head.proj"),
    ],
)
def test_a_markov_folder_whose_tensors_are_those_of_another_head_is_refused_by_name(tmp_path, change, named):
    raw = raw_config("markov_rnn", "drafter")
    raw["dflash_config"] |= change
    folder = write_model(tmp_path, raw, stored_tensors("markov_rnn", "drafter"))
    with pytest.raises(DataError, match=named):
        load_drafter(folder, target_config("markov_rnn"), "float32")
