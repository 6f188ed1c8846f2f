"""Drafters in the speculators layout: hand-made folders of both algorithms give the drafter they were made of."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.drafter import load_drafter, save_drafter
from tests.helpers.golden_files import SETS, raw_config, stored_tensors, target_config, write_model
from tests.helpers.models import MARKOV_SETS
from tests.helpers.paths import GOLDEN

MARKOV_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")

HEAD = ("prefix_gru", "embed_proj")
# What Qwen3Config leaves out of transformer_layer_config because its defaults are the same.
LEFT_OUT = {"rms_norm_eps": 1e-6, "attention_bias": False, "hidden_act": "silu"}


def speculators(folder: Path, name: str, algorithm: str, copies: bool = True, **changes) -> Path:
    """The golden drafter `name` as speculators would store it."""
    public, tensors = raw_config(name, "drafter"), stored_tensors(name, "drafter")
    nested = public["dflash_config"]
    layer = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    layer += ("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "attention_bias", "hidden_act")
    theta = public.get("rope_theta") or public["rope_parameters"]["rope_theta"]
    transformer = {key: public[key] for key in layer if key in public and public[key] != LEFT_OUT.get(key)}
    raw = {
        "architectures": ["DominoSpeculator" if algorithm == "domino" else "DFlashSpeculator"],
        "speculators_model_type": algorithm,
        "transformer_layer_config": {"model_type": "qwen3", "rope_parameters": {"rope_theta": theta}, **transformer},
        "draft_vocab_size": public["vocab_size"],
        "block_size": public["block_size"],
        "aux_hidden_state_layer_ids": [index + 1 for index in nested["target_layer_ids"]],
        "mask_token_id": nested["mask_token_id"],
        "sample_from_anchor": nested["shift_label"],
        "speculators_config": {"algorithm": algorithm, "verifier": {"name_or_path": "owner/target"}},
    }
    if algorithm == "domino":
        raw |= {"gru_hidden_dim": nested["gru_hidden_dim"], "logits_correction_emb_dim": nested["emb_dim"]}
        raw |= {"pure_draft_prefix_len": nested["pure_draft_prefix_len"]}
        tensors = {f"logits_correction.{key}" if key.startswith(HEAD) else key: tensors[key] for key in tensors}
    else:
        tensors = {key: tensors[key] for key in tensors if not key.startswith(HEAD)}
    if copies:
        own = stored_tensors(name, "target")
        embedding = own["model.embed_tokens.weight"]
        tensors["embed_tokens.weight"] = embedding
        tensors["lm_head.weight"] = own.get("lm_head.weight", embedding)
        tensors["verifier_norm.weight"] = own["model.norm.weight"]
    raw = {key: value for key, value in {**raw, **changes}.items() if value != "absent"}
    return write_model(folder, raw, tensors)


@pytest.mark.parametrize("algorithm", ["dflash", "domino"])
@pytest.mark.parametrize("name", SETS)
def test_a_speculators_folder_is_the_drafter_it_was_made_of(tmp_path, name, algorithm):
    target, public = target_config(name), raw_config(name, "drafter")
    folder = speculators(tmp_path / "theirs", name, algorithm)
    config, params = load_drafter(folder, target, "float32", target_path=GOLDEN / name / "target")
    expected, original = load_drafter(GOLDEN / name / "drafter", target, "float32")
    if algorithm == "dflash":
        del original["head"]
    assert config.target_layer_ids == expected.target_layer_ids and config.rope_theta == expected.rope_theta
    assert (config.shift_label, config.has_head) == (public["dflash_config"]["shift_label"], algorithm == "domino")
    jax.tree.map(np.testing.assert_array_equal, original, params)
    save_drafter(tmp_path / "ours", config, params, "float32")
    again, params = load_drafter(tmp_path / "ours", target, "float32")
    assert again.to_dict() == config.to_dict()
    jax.tree.map(np.testing.assert_array_equal, original, params)


KINDS = {**dict.fromkeys(MARKOV_SETS, "dspark"), "dflash2": "dflash2"}
# Shifted by default in one; whether sliding layers are causal is its own key in the other.
CHOICES = {
    "dspark": {"sample_from_anchor": True},
    "dflash2": {"sample_from_anchor": False, "sliding_window_non_causal": True},
}
WRONG = {
    "dspark": {"sample_from_anchor": (False, None), "markov_head_type": (None,)},
    "dflash2": {"selector_rank": (None,)},
}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_with_another_head_is_the_drafter_it_was_made_of(tmp_path, name):
    """The head's keys are flat there. The nested layer may name the class of the target."""
    public, tensors = raw_config(name, "drafter"), stored_tensors(name, "drafter")
    nested, target, kind = public.pop("dflash_config"), target_config(name), KINDS[name]
    apart = ("target_layer_ids", "shift_label", "projector_type", "attention_mode")
    raw = {
        "architectures": ["DraftModel"],
        "speculators_model_type": kind,
        "transformer_layer_config": {key: public[key] for key in public if key not in MARKOV_KEYS}
        | {"architectures": ["Qwen3ForCausalLM"]},
        "draft_vocab_size": public["vocab_size"],
        "aux_hidden_state_layer_ids": [index + 1 for index in nested["target_layer_ids"]],
        **{key: public[key] for key in ("block_size", *MARKOV_KEYS) if key in public},
        **{key: value for key, value in nested.items() if key not in apart},
        **CHOICES[kind],
    }
    config, params = load_drafter(write_model(tmp_path / "theirs", raw, tensors), target, "float32")
    expected, original = load_drafter(GOLDEN / name / "drafter", target, "float32")
    assert config.to_dict() == expected.to_dict()
    jax.tree.map(np.testing.assert_array_equal, original, params)
    for key, value in ((key, value) for key, values in WRONG[kind].items() for value in values):
        with pytest.raises(DataError, match=key):
            load_drafter(write_model(tmp_path / "other", raw | {key: value}, tensors), target, "float32")


def changed_layer(folder: Path, **changes) -> Path:
    """The folder with other keys in transformer_layer_config; None removes one."""
    raw = json.loads((folder / "config.json").read_text())
    layer = {**raw["transformer_layer_config"], **changes}
    raw["transformer_layer_config"] = {key: value for key, value in layer.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_keys_left_out_mean_the_defaults_of_qwen3(tmp_path):
    folder = changed_layer(speculators(tmp_path, "tied_shift", "dflash", copies=False), rope_parameters=None)
    config, _ = load_drafter(folder, target_config("tied_shift"), "float32")
    assert (config.rope_theta, config.rms_norm_eps) == (10_000.0, 1e-6)


@pytest.mark.parametrize("non_causal, causal", [(False, True), (True, False)])
def test_sliding_layers_are_causal_unless_the_file_sets_it(tmp_path, non_causal, causal):
    folder = speculators(tmp_path, "tied_shift", "dflash", sliding_window_non_causal=non_causal, copies=False)
    changed_layer(folder, layer_types=["full_attention", "sliding_attention"], sliding_window=6)
    config, _ = load_drafter(folder, target_config("tied_shift"), "float32")
    assert [config.causal(layer) for layer in (0, 1)] == [False, causal]
    assert [config.window(layer) for layer in (0, 1)] == [None, 6]


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"speculators_model_type": "mtp"}, "speculators_model_type 'mtp'"),
        ({"draft_vocab_size": 100}, "draft_vocab_size 100 and vocab_size 260"),
        ({"sample_from_anchor": "absent"}, "lacks sample_from_anchor"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"attention_sink_bias": True}, "attention_sink_bias True"),
        ({"target_hidden_size": 32}, "target_hidden_size 32"),
        ({"aux_hidden_state_layer_ids": 3}, "aux_hidden_state_layer_ids 3; expected a list"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, changes, named):
    folder = speculators(tmp_path / "theirs", "tied_shift", "domino", **changes, copies=False)
    with pytest.raises(DataError, match=named) as error:
        load_drafter(folder, target_config("tied_shift"), "float32", target_path=GOLDEN / "tied_shift" / "target")
    assert len(str(error.value).splitlines()) <= 5


@pytest.mark.parametrize("name, tensor", [("tied_shift", "embed_tokens"), ("untied_noshift", "lm_head")])
def test_embeddings_that_are_not_the_targets_are_refused(tmp_path, name, tensor):
    folder = speculators(tmp_path / "theirs", name, "dflash")
    tensors = load_file(folder / hf.SINGLE)
    tensors[f"{tensor}.weight"][-1, 0] += 1.0
    save_file(tensors, folder / hf.SINGLE)
    with pytest.raises(DataError, match=f"{tensor}.weight differs from the target's"):
        load_drafter(folder, target_config(name), "float32", target_path=GOLDEN / name / "target")
    with pytest.raises(DataError, match="no target was given to compare"):
        load_drafter(folder, target_config(name), "float32")
