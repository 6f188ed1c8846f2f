"""Drafters that NVIDIA's modelopt 0.47 exports: its keys of windows, and a note about its RoPE base."""

import pytest

from domino_jax.weights.drafter import load_drafter
from tests.helpers.golden_files import folder_of, raw_config, stored_tensors, target_config, write_model

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES += ("intermediate_size", "rms_norm_eps", "vocab_size", "max_position_embeddings", "block_size")
SIZES += ("num_target_layers",)


def modelopt_folder(tmp_path, name: str, theta: float | None = None, **nested):
    """A golden drafter as modelopt would export it; nested: keys of dflash_config."""
    public, tensors = raw_config(name, "drafter"), stored_tensors(name, "drafter")
    ids = {key: public["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    theirs = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{key: public[key] for key in SIZES},
        "rope_theta": theta or public.get("rope_theta") or public["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "layer_types": ["full_attention"] * public["num_hidden_layers"],
        "dflash_config": {**ids, "causal": False, **nested},
    }
    if nested.get("use_swa"):
        theirs["sliding_window"] = nested["swa_window_size"]
    return write_model(tmp_path / "modelopt", theirs, tensors)


@pytest.mark.parametrize("causal", [True, False])
def test_a_domino_drafter_with_a_window_has_sliding_layers(tmp_path, causal):
    public = raw_config("tied_shift", "drafter")["dflash_config"]
    folder = modelopt_folder(tmp_path, "tied_shift", **public, use_swa=True, swa_window_size=16, causal=causal)
    config, _ = load_drafter(folder, target_config("tied_shift"), "float32")
    assert {config.window(layer) for layer in range(config.num_hidden_layers)} == {16}
    assert {config.causal(layer) for layer in range(config.num_hidden_layers)} == {causal}


@pytest.mark.parametrize("theta", [1e6, 1e4])
def test_a_note_states_the_rope_base_that_modelopt_may_have_trained_with(tmp_path, caplog, theta):
    folder = modelopt_folder(tmp_path, "tied_shift", theta, **raw_config("tied_shift", "drafter")["dflash_config"])
    load_drafter(folder, target_config("tied_shift"), "float32")
    noted = "trains drafters at RoPE base 10,000 and writes the target's, here 1,000,000" in caplog.text
    assert noted == (theta == 1e6)
    caplog.clear()
    load_public("tied_shift")
    assert "modelopt" not in caplog.text


def load_public(name: str):
    return load_drafter(folder_of(name, "drafter"), target_config(name), "float32")
