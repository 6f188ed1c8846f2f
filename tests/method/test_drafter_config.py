"""A drafter's config.json: both places of every key, what is never guessed, and what would change the computation.

Values of a wrong type: tests/weights/test_config_kinds.py.
"""

import pytest

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafters import parse_config
from domino_jax.runtime.errors import DataError
from tests.helpers.public_drafter import PUBLIC_8B


def read(nested: dict | None = None, **top) -> DrafterConfig:
    """The public config with other keys at the top level and in dflash_config; "absent" removes one."""
    raw = {**PUBLIC_8B, **top, "dflash_config": {**PUBLIC_8B["dflash_config"], **(nested or {})}}
    raw["dflash_config"] = {key: value for key, value in raw["dflash_config"].items() if value != "absent"}
    return parse_config({key: value for key, value in raw.items() if value != "absent"})


PLAIN = {key: "absent" for key in PUBLIC_8B["dflash_config"] if key not in ("mask_token_id", "target_layer_ids")}


@pytest.mark.parametrize("place", ["top", "nested", "both"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 8),
        ("emb_dim", 32),
        ("gru_hidden_dim", 48),
        ("pure_draft_prefix_len", 2),
        ("shift_label", False),
        ("projector_type", "domino"),
    ],
)
def test_a_key_is_read_at_top_level_in_dflash_config_or_in_both(key, value, place):
    nested, top = (value if place in (here, "both") else "absent" for here in ("nested", "top"))
    config = read({key: nested}, **{key: top})
    assert getattr(config, {"projector_type": "head"}.get(key, key)) == value


@pytest.mark.parametrize(
    "extra", [{"rope_parameters": {"rope_theta": 5e5}}, {"emb_dim": 255}, {"sample_from_anchor": False}]
)
def test_two_places_that_disagree_are_refused(extra):
    """Which of them is right cannot be seen, so no edit is named."""
    with pytest.raises(DataError, match="written with these weights"):
        read(**extra)


@pytest.mark.parametrize(
    ("top", "nested", "named"),
    [
        ({"block_size": 2**30}, {}, "block_size .* must be in"),
        ({}, {"mask_token_id": "absent"}, "mask_token_id"),
        ({}, {"target_layer_ids": "absent"}, "target_layer_ids"),
        ({}, {"shift_label": "absent"}, "shift_label"),
        ({}, {"projector_type": "xspark"}, "dflash_config.projector_type 'xspark'"),
        ({"is_causal": False}, {"causal": True}, "is_causal False and causal True"),
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": None}, {}, "no layer_types"),
        ({}, {"query_zero_predicts_next": False}, "shift_label True and query_zero_predicts_next False"),
        ({}, {"final_logit_softcapping": 30.0}, "dflash_config.final_logit_softcapping 30.0"),
        ({}, {"conv_kernel_size": 2, "conv_group_size": 24}, "conv_group_size 24 does not divide hidden_size 4096"),
        ({}, {"selector_rank": 12, "selector_top_k": 6}, "dflash_config.selector_rank 12"),
        ({}, {"markov_rank": 12}, "dflash_config.markov_rank 12"),
        ({"partial_rotary_factor": 0.5}, {}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {}, "rope_scaling"),
        ({"hidden_act": "gelu"}, {}, "hidden_act"),
        ({"draft_vocab_size": 32000}, {}, "draft_vocab_size 32000 and vocab_size 151936"),
        ({"sample_from_anchor": False}, {}, "shift_label True and sample_from_anchor False"),
        ({}, {"shift_label": False, "pure_draft_prefix_len": -1}, "pure_draft_prefix_len -1"),
        ({}, {"target_layer_ids": [1, 9, 9, 25, 33]}, "must be distinct .* use fewer draft layers"),
        ({"sliding_window": "wide", "use_sliding_window": False}, {}, "sliding_window 'wide'"),
        (
            {"layer_types": ["sliding_attention"] * 5, "sliding_window": -5, "use_sliding_window": True},
            {},
            "sliding_window",
        ),
    ],
)
def test_a_missing_impossible_or_unknown_meaning_is_refused_by_name(top, nested, named):
    with pytest.raises(DataError, match=named) as error:
        read(nested, **top)
    assert len(str(error.value).splitlines()) <= 5


def test_causal_v5_is_the_old_name_of_domino_and_a_missing_gru_width_is_the_rank():
    assert read({"projector_type": "causal_v5"}) == read()
    assert read({"gru_hidden_dim": "absent"}).gru_hidden_dim == 256


@pytest.mark.parametrize("place", ["top", "nested", "both"])
@pytest.mark.parametrize("shifted", [True, False])
def test_sample_from_anchor_decides_whether_a_plain_drafter_is_shifted(shifted, place):
    nested, top = (shifted if place in (here, "both") else "absent" for here in ("nested", "top"))
    config = read({**PLAIN, "sample_from_anchor": nested}, sample_from_anchor=top)
    assert config.shift_label is shifted and not config.has_head
    again = config.to_dict()
    stated = [raw.get("sample_from_anchor") for raw in (again, again["dflash_config"])]
    assert stated == ([True, True] if shifted else [None, None])
    assert parse_config(again).shift_label is shifted


SLIDING = {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True}


def test_is_causal_false_is_not_an_absent_one():
    for value, causal in ((None, True), (True, True), (False, False)):
        config = read(**SLIDING, is_causal=value)
        assert (config.is_causal, config.causal(0)) == (value, causal)
        assert read({"causal": value}, **SLIDING) == config
    assert not read().causal(0)


@pytest.mark.parametrize(
    ("top", "nested"),
    [
        ({"hidden_act": "swish"}, {}),
        ({"partial_rotary_factor": 1}, {"use_swa": False}),
        ({"markov_rank": 0}, {"final_logit_softcapping": 0.0, "selector_rank": None}),
        ({"query_zero_predicts_next": True}, {"sample_from_anchor": True}),
        ({"logit_scale": 1, "target_hidden_size": 4096, "gating": False}, {"attention_value_scale": 1.0}),
    ],
)
def test_a_default_is_read_in_another_spelling(top, nested):
    assert read(nested, **top) == read()


@pytest.mark.parametrize("place", ["top", "nested"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_value_scale", 0.707),
        ("attention_sink_bias", True),
        ("add_swa_attention_sink_bias", True),
        ("add_full_attention_sink_bias", True),
        ("is_neox_style", False),
        ("rope_is_neox_style", False),
        ("rope_interleaved", True),
        ("rope_scaling", {"rope_dim": 64}),
        ("use_gemma_norm", True),
        ("gating", "per-head"),
        ("logit_scale", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("target_hidden_size", 2560),
        ("use_confidence_head", True),
    ],
)
def test_a_key_with_which_other_programs_compute_something_else_is_refused_by_name(key, value, place):
    with pytest.raises(DataError, match=r"rope_dim 64" if key == "rope_scaling" else f"{key} {value!r}"):
        read(**({key: value} if place == "top" else {"nested": {key: value}}))


@pytest.mark.parametrize("causal", [True, False, None])
def test_use_swa_makes_all_layers_slide_as_layer_types_do(causal):
    """As modelopt writes it: layer_types are full, and causal is stated. vLLM takes a missing causal for false."""
    stated = {} if causal is None else {"causal": causal}
    ours = read(**SLIDING, is_causal=bool(causal))
    for kinds in (["full_attention"] * 5, None):
        swa = {"use_swa": True, "swa_window_size": 2048, **stated}
        assert read(swa, layer_types=kinds, sliding_window=2048, use_sliding_window=None) == ours
        assert read(swa, layer_types=kinds, sliding_window=None, use_sliding_window=False) == ours
    assert parse_config(ours.to_dict()) == ours
    mixed = {**SLIDING, "layer_types": ["full_attention", *["sliding_attention"] * 4]}
    assert read({"use_swa": True, **stated}, **mixed) == read(**mixed, is_causal=causal)


# --------------------------------------------------------------------------------------------------- Markov heads

MARKOV = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
IDS = {name: PUBLIC_8B["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
BACKBONE = {key: value for key, value in PUBLIC_8B.items() if key != "dflash_config"}
DSPARK = {**BACKBONE, "architectures": ["DSparkDraftModel"], "block_size": 7}
NESTED = {**IDS, "projector_type": "dspark", "attention_mode": "gqa", **MARKOV, "confidence_head_alpha": 1.0}


def read_markov(nested: dict | None = None, **top) -> DrafterConfig:
    """SpecForge's layout with other keys at the top level and in dflash_config; None removes one."""
    nested = {key: value for key, value in {**NESTED, **(nested or {})}.items() if value is not None}
    return parse_config({**DSPARK, **top, "dflash_config": nested})


def markov_of(config: DrafterConfig) -> dict:
    return {name: getattr(config, name) for name in MARKOV}


@pytest.mark.parametrize("place", ["top", "nested", "both"])
def test_markov_keys_are_read_in_either_place_and_in_deepspecs_flat_files(place):
    nested, top = ({**MARKOV} if place in (here, "both") else dict.fromkeys(MARKOV) for here in ("nested", "top"))
    flat = parse_config({**BACKBONE, "architectures": ["Qwen3DSparkModel"], "block_size": 7, **IDS, **MARKOV})
    for config in (read_markov(nested, **top), flat):
        assert (config.head, config.shift_label, config.num_drafts, config.suffix_start) == ("markov", True, 7, 0)
        assert markov_of(config) == MARKOV and not config.reads_embeddings


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_both_places_of_markov_keys_are_written_and_read_back(kind):
    raw = read_markov({"markov_head_type": kind, "confidence_head_with_markov": False}).to_dict()
    for place in (raw, raw["dflash_config"]):
        assert (place["markov_head_type"], place["markov_rank"], place["projector_type"]) == (kind, 256, "dspark")
        assert (place["attention_mode"], place["confidence_head_alpha"]) == ("gqa", 1.0)
        assert "shift_label" not in place and "sample_from_anchor" not in place
    assert raw["architectures"] == ["DSparkDraftModel"]
    assert parse_config(raw).to_dict() == raw


def test_a_missing_switch_of_the_confidence_head_follows_its_weight():
    for weight, there in ((1.0, True), (0.0, False), (None, False)):
        config = read_markov({"enable_confidence_head": None, "confidence_head_alpha": weight})
        assert config.enable_confidence_head is there and config.confidence_head_with_markov is there


@pytest.mark.parametrize(
    ("nested", "top", "named"),
    [
        ({}, {"markov_rank": 128}, "markov_rank 128 and dflash_config.markov_rank 256"),
        ({"markov_rank": None}, {}, "lacks markov_rank"),
        ({"markov_head_type": "lstm"}, {}, "markov_head_type 'lstm'; expected one of vanilla, gated, rnn"),
        ({"shift_label": False}, {}, "shift_label False"),
        ({}, {"sample_from_anchor": False}, "sample_from_anchor False"),
        ({"query_zero_predicts_next": False}, {}, "query_zero_predicts_next False"),
        ({}, {"dspark_bonus_anchor": True}, "dspark_bonus_anchor True"),
        ({"pure_draft_prefix_len": 1}, {}, "pure_draft_prefix_len 1"),
        ({"projector_type": "domino"}, {}, "projector_type 'domino' and architectures"),
        ({"selector_rank": 8}, {}, "selector_rank 8"),
    ],
)
def test_a_contradiction_or_a_missing_markov_key_is_refused_by_name(nested, top, named):
    with pytest.raises(DataError, match=named) as error:
        read_markov(nested, **top)
    assert len(str(error.value).splitlines()) <= 5
