"""The config.json of DSpark's drafters: both places of the Markov keys, DeepSpec's flat files, contradictions."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafters import parse_config
from domino_jax.runtime.errors import DataError
from domino_jax.weights.drafter import stored_head
from tests.helpers.public_drafter import PUBLIC_8B

BACKBONE = {key: value for key, value in PUBLIC_8B.items() if key != "dflash_config"}
IDS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
MARKOV = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "confidence_head_alpha": 1.0,
}
PUBLIC = {**BACKBONE, "architectures": ["DSparkDraftModel"], "block_size": 7}
FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def read(nested: dict | None = None, **top) -> DrafterConfig:
    """SpecForge's layout with other keys at the top level and in dflash_config; None removes one."""
    nested = {**IDS, "projector_type": "dspark", "attention_mode": "gqa", **MARKOV, **(nested or {})}
    return parse_config({**PUBLIC, **top, "dflash_config": {k: v for k, v in nested.items() if v is not None}})


def markov_of(config: DrafterConfig) -> dict:
    return {name: getattr(config, name) for name in FIELDS}


EXPECTED = {name: MARKOV[name] for name in FIELDS}


@pytest.mark.parametrize("place", ["top", "nested", "both"])
def test_the_keys_are_read_in_either_place(place):
    nested, top = ({**MARKOV} if place in (here, "both") else dict.fromkeys(MARKOV) for here in ("nested", "top"))
    config = read(nested, **top)
    assert (config.head, config.shift_label, config.num_drafts, config.suffix_start) == ("markov", True, 7, 0)
    assert markov_of(config) == EXPECTED and not config.reads_embeddings


def test_deepspecs_flat_files_are_read():
    config = parse_config({**BACKBONE, "architectures": ["Qwen3DSparkModel"], "block_size": 7, **IDS, **MARKOV})
    assert markov_of(config) == EXPECTED and config.shift_label and config.target_layer_ids == (1, 9, 17, 25, 33)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_both_places_are_written_and_read_back(kind):
    config = read({"markov_head_type": kind, "confidence_head_with_markov": False})
    raw = config.to_dict()
    for place in (raw, raw["dflash_config"]):
        assert (place["markov_head_type"], place["markov_rank"], place["projector_type"]) == (kind, 256, "dspark")
        assert (place["attention_mode"], place["confidence_head_alpha"]) == ("gqa", 1.0)
        assert "shift_label" not in place and "sample_from_anchor" not in place
    assert raw["architectures"] == ["DSparkDraftModel"]
    assert parse_config(raw).to_dict() == raw


def test_a_missing_switch_of_the_confidence_head_follows_its_weight():
    for weight, there in ((1.0, True), (0.0, False), (None, False)):
        config = read({"enable_confidence_head": None, "confidence_head_alpha": weight})
        assert config.enable_confidence_head is there and config.confidence_head_with_markov is there


def test_rank_zero_is_plain_shifted_dflash(tmp_path):
    nested = {**IDS, **MARKOV, "projector_type": "dspark", "markov_rank": 0, "enable_confidence_head": False}
    config = read(nested)
    assert (config.head, config.shift_label) == ("none", True)
    (tmp_path / "config.json").write_text(json.dumps({**PUBLIC, "dflash_config": nested}))
    save_file({"norm.weight": np.ones(4)}, tmp_path / "model.safetensors")
    assert stored_head(tmp_path) == "none"
    with pytest.raises(DataError, match="pure_draft_prefix_len 1"):
        read({**nested, "pure_draft_prefix_len": 1})


@pytest.mark.parametrize(
    ("nested", "top", "named"),
    [
        ({}, {"markov_rank": 128}, "markov_rank = 128 at top level and 256"),
        ({"markov_rank": None}, {}, "lacks markov_rank"),
        ({"markov_rank": 2.5}, {}, "markov_rank 2.5"),
        ({"markov_head_type": None}, {}, "lacks markov_head_type"),
        ({"markov_head_type": "lstm"}, {}, "markov_head_type 'lstm'; expected one of vanilla, gated, rnn"),
        ({"markov_rank": 0}, {}, "markov_rank 0"),
        ({"shift_label": False}, {}, "shift_label False"),
        ({}, {"sample_from_anchor": False}, "sample_from_anchor False"),
        ({"pure_draft_prefix_len": 1}, {}, "pure_draft_prefix_len 1"),
        ({"projector_type": "domino"}, {}, "projector_type 'domino' and architectures"),
        ({"enable_confidence_head": "yes"}, {}, "enable_confidence_head = 'yes'"),
        ({"enable_confidence_head": None, "confidence_head_alpha": "x"}, {}, "confidence_head_alpha 'x'"),
        ({"mask_token_id": None}, {}, "lacks mask_token_id"),
        ({"selector_rank": 8}, {}, "selector_rank 8"),
        ({"attention_mode": "mha"}, {}, "attention_mode 'mha' with num_attention_heads 32 and num_key_value_heads 8"),
    ],
)
def test_a_contradiction_or_a_missing_key_is_refused_by_name(nested, top, named):
    with pytest.raises(DataError, match=named) as error:
        read(nested, **top)
    assert len(str(error.value).splitlines()) <= 5


def test_markov_keys_in_another_drafter_are_refused_by_name():
    with pytest.raises(DataError, match="markov_rank 256"):
        read({"projector_type": "domino", "shift_label": True, "emb_dim": 8}, architectures=["DFlashDraftModel"])
