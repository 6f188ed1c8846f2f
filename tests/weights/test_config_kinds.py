"""Every key of every drafter's config.json with a value of the wrong kind: refused by file and key, or not read."""

from pathlib import Path

import pytest

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafters import config_class, parse_config, stored_config
from domino_jax.method.heads.eagle3 import Eagle3Config
from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf, speculators
from domino_jax.weights.drafter import load_drafter, stored_head
from tests.helpers.golden_files import folder_of, raw_config, target_config, write_model

HEADS = {
    **{name: "domino" for name in ("tied_shift", "untied_noshift")},
    **{name: "markov" for name in ("markov_vanilla", "markov_gated", "markov_rnn")},
    **{name: name for name in ("dflash2", "xpress", "eagle3")},
}
WRONG = ("x", ["x"], {"x": 1}, True, 1.5)
NESTED = {
    "speculators_model_type": "domino",
    "transformer_layer_config": {
        "rope_parameters": {"rope_theta": 1e6},
        "layer_types": ["full_attention"] * 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
    },
    "draft_vocab_size": 151_936,
    "block_size": 8,
    "aux_hidden_state_layer_ids": [2, 4],
    "mask_token_id": 9,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    **{"gru_hidden_dim": 8, "logits_correction_emb_dim": 8, "pure_draft_prefix_len": 1},
}


def parsers():
    """name → (a sound config.json, its parser)."""
    found = {"speculators": (NESTED, lambda raw: parse_config(speculators.flattened(raw, 8)))}
    for name in HEADS:
        raw = raw_config(name, "drafter")
        kind = config_class(raw)
        found[name] = raw, kind.from_dict
        found[f"{name} as written"] = stored_config(kind.from_dict(raw)), kind.from_dict
    return found


def sections(raw: dict) -> list[tuple[dict, str]]:
    """Every (object, key) of nested objects."""
    inner = [pair for value in raw.values() if isinstance(value, dict) for pair in sections(value)]
    return [(raw, key) for key in raw] + inner


@pytest.mark.parametrize("name", parsers())
def test_a_value_of_the_wrong_kind_is_refused_by_its_key_or_not_read(name):
    raw, parse = parsers()[name]
    sound = parse(raw)
    for place, key in sections(raw):
        original = place[key]
        for value in WRONG:
            if type(value) is type(original) or (type(original) is float and value in (True, 1.5)):
                continue
            place[key] = value
            try:
                with hf.naming(Path("folder")):
                    assert parse(raw) == sound, (key, value)
            except DataError as error:
                text = str(error)
                assert key.removeprefix("logits_correction_") in text and "folder/config.json" in text, (key, value)
                assert len(text.splitlines()) <= 5
        place[key] = original


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_a_folder_is_in_its_config(name):
    assert stored_head(folder_of(name, "drafter")) == HEADS[name]


EAGLE1 = ("embed_tokens.weight", "fc.bias", "fc.weight", "layers.0.mlp.up_proj.weight")
LAYOUTS = {  # {layout: (config.json, tensors, what reads it, or what its refusal names)}
    "EAGLE-3 of SafeAILab": ({"architectures": ["LlamaForCausalLM"]}, ("d2t", "midlayer.hidden_norm.weight"), "eagle3"),
    "EAGLE-3 of speculators": ({"speculators_model_type": "eagle3"}, (), "eagle3"),
    "Medusa": ({"architectures": ["MedusaModel"]}, ("blocks.0.layers.0.weight",), ("MedusaModel", "known kind")),
    "DFlash of vLLM": ({"dflash_config": {"x": 1}, "eagle_aux_hidden_state_layer_ids": [1]}, (), "block"),
    "EAGLE-1": ({"architectures": ["LlamaForCausalLM"]}, EAGLE1, ("LlamaForCausalLM", "fc.bias")),
    "a target": ({"architectures": ["Qwen3ForCausalLM"]}, ("model.norm.weight",), ("Qwen3ForCausalLM", "model.norm")),
    "nothing": ({"architectures": 5}, (), ("architectures 5", "none")),
}
READERS = {"block": DrafterConfig, "eagle3": Eagle3Config}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_is_known_by_its_keys_and_tensors_or_refused_with_both(layout):
    raw, tensors, expected = LAYOUTS[layout]
    if isinstance(expected, str):
        assert issubclass(config_class(raw, tensors), READERS[expected])
        return
    with pytest.raises(DataError) as error:
        config_class(raw, tensors)
    assert all(part in str(error.value) for part in expected)


@pytest.mark.parametrize(
    ("name", "key"), [("markov_vanilla", "markov_rank"), ("dflash2", "selector_rank"), ("xpress", "xpress_rank")]
)
def test_a_folder_without_the_class_of_its_keys_is_refused_by_them(tmp_path, name, key):
    raw = raw_config(name, "drafter") | {"architectures": ["DFlashDraftModel"]}
    raw["dflash_config"].pop("projector_type", None)
    folder = write_model(tmp_path / "drafter", raw, {})
    with pytest.raises(DataError, match=rf"{folder}/config.json has (dflash_config.)?{key} "):
        load_drafter(folder, target_config(name), "float32")
