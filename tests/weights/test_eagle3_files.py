"""EAGLE-3 folders: read strictly, written as they are read, other layouts refused by name."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from domino_jax.method.heads.eagle3 import NORMS
from domino_jax.runtime.errors import DataError
from domino_jax.weights.drafter import load_drafter, save_drafter, stored_head
from domino_jax.weights.servers import server_refusals
from tests.helpers.golden_files import folder_of, raw_config, stored_tensors, target_config, write_model


def load(folder, dtype="float32"):
    return load_drafter(folder, target_config("eagle3"), dtype, target_path=folder_of("eagle3", "target"))


def changed(tmp_path, config=None, tensors=None, without=()):
    """The golden folder with other keys and tensors."""
    raw = raw_config("eagle3", "drafter") | (config or {})
    stored = stored_tensors("eagle3", "drafter") | (tensors or {})
    return write_model(tmp_path / "drafter", raw, {key: value for key, value in stored.items() if key not in without})


def flat(params) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def test_in_float32_every_tensor_comes_back_bit_for_bit_with_the_vocabulary(tmp_path):
    config, params = load(folder_of("eagle3", "drafter"))
    save_drafter(tmp_path / "out", config, params, "float32")
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), stored_tensors("eagle3", "drafter")
    assert set(ours) == set(theirs)
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype and np.array_equal(ours[key], tensor), key


def test_vllms_names_and_copies_of_the_embedding_are_read(tmp_path):
    stored = stored_tensors("eagle3", "drafter")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
    embedding = stored_tensors("eagle3", "target")["model.embed_tokens.weight"]
    renamed["embed_tokens.weight"] = np.asarray(embedding, np.float32)
    folder = write_model(tmp_path / "vllm", raw_config("eagle3", "drafter"), renamed)
    (config, params), (ours, plain) = load(folder), load(folder_of("eagle3", "drafter"))
    assert config == ours
    assert all(np.array_equal(one, other) for one, other in zip(flat(params), flat(plain), strict=True))
    renamed["embed_tokens.weight"] = renamed["embed_tokens.weight"] + 1
    with pytest.raises(DataError, match="embed_tokens.weight differs from the target's"):
        load(write_model(tmp_path / "other", raw_config("eagle3", "drafter"), renamed))


def test_a_published_folder_without_our_keys_is_read(tmp_path):
    """SafeAILab's: the class of a target and no rope_theta, which is Llama's 10,000 then."""
    raw = raw_config("eagle3", "drafter") | {"architectures": ["LlamaForCausalLM"]}
    del raw["rope_theta"]
    config, params = load(write_model(tmp_path, raw, stored_tensors("eagle3", "drafter")))
    ours, theirs = load(folder_of("eagle3", "drafter"))
    assert config == dataclasses.replace(ours, rope_theta=10_000.0)
    assert all(np.array_equal(one, other) for one, other in zip(flat(params), flat(theirs), strict=True))


ABSOLUTE = stored_tensors("eagle3", "drafter")["t2d"].nonzero()[0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": ABSOLUTE}, "holds offsets|d2t holds offsets"),
        ({"d2t": np.zeros(64, np.int64)}, "d2t and t2d name different tokens"),
        ({"d2t": np.zeros(63, np.int64)}, "it is 63 tokens"),
        ({"t2d": np.ones(64, bool)}, "d2t and t2d name different tokens"),
    ],
)
def test_a_draft_vocabulary_that_does_not_fit_is_refused(tmp_path, tensors, message):
    """Absolute ids instead of offsets among them: these would be other tokens, and acceptance would be lost."""
    with pytest.raises(DataError, match=f"(?s){message}"):
        load(changed(tmp_path, tensors=tensors))


def test_a_draft_vocabulary_without_its_map_is_refused_and_a_whole_one_needs_none(tmp_path):
    with pytest.raises(DataError, match="lacks t2d, which map its 64 draft tokens"):
        load(changed(tmp_path, without=("t2d",)))
    whole = {"lm_head.weight": np.zeros((260, 64), np.float32)}
    folder = changed(tmp_path, {"draft_vocab_size": 260}, whole, without=("d2t", "t2d"))
    assert not len(load(folder)[0].draft_tokens)


def speculators_eagle3(tmp_path, name="theirs", **changes):
    """The golden drafter as speculators 0.9.0 stores it; its training sets NORMS and a window by default."""
    public, tensors = raw_config("eagle3", "drafter"), stored_tensors("eagle3", "drafter")
    layer = {key: public[key] for key in LAYER if public[key] != LLAMA_DEFAULTS.get(key)}
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": public["rope_theta"]}}
    layer |= {"layer_types": ["full_attention"], "sliding_window": 2048, "use_sliding_window": False}
    raw = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer | changes.pop("layer", {}),
        "draft_vocab_size": public["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        **dict.fromkeys((*NORMS, "fc_norm", "embed_requires_grad"), False),
        **changes,
    }
    stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    stored["embed_tokens.weight"] = stored_tensors("eagle3", "target")["model.embed_tokens.weight"]
    if raw["norm_before_fc"]:
        stored["input_norm.weight"] = np.linspace(0.5, 1.5, 3 * 64, dtype=np.float32)
    return write_model(tmp_path / name, {key: value for key, value in raw.items() if value != "absent"}, stored)


LAYER = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
LAYER += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "vocab_size", "attention_bias")
LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "attention_bias": False}


def test_a_speculators_folder_is_the_drafter_it_was_made_of(tmp_path):
    (config, params), (ours, theirs) = load(speculators_eagle3(tmp_path)), load(folder_of("eagle3", "drafter"))
    assert config == ours and stored_head(tmp_path / "theirs") == "eagle3"
    assert all(np.array_equal(one, other) for one, other in zip(flat(params), flat(theirs), strict=True))


def test_the_norms_and_the_window_of_speculators_training_are_kept_in_a_flat_folder(tmp_path):
    sliding = {"layer_types": ["sliding_attention"], "use_sliding_window": True, "sliding_window": 6}
    config, params = load(speculators_eagle3(tmp_path, **dict.fromkeys(NORMS, True), layer=sliding))
    assert all(getattr(config, name) for name in NORMS) and config.sliding_window == 6
    save_drafter(tmp_path / "ours", config, params, "float32")
    again, stored = load(tmp_path / "ours")
    assert again == config
    assert all(np.array_equal(one, other) for one, other in zip(flat(params), flat(stored), strict=True))
    # What SGLang has no key for.
    sglang, vllm = server_refusals(config)
    assert "norm_before_residual" in sglang and vllm is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_residual": "absent"}, "lacks norm_before_residual"),
        ({"fc_norm": True}, "fc_norm True"),
        ({"layer": {"rope_is_neox_style": False}}, "rope_is_neox_style False"),
        ({"layer": {"model_type": "qwen3"}}, "model_type 'qwen3'"),
        ({"draft_vocab_size": None}, "lacks draft_vocab_size"),
    ],
)
def test_a_speculators_eagle3_that_cannot_be_read_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        load(speculators_eagle3(tmp_path, **changes))
