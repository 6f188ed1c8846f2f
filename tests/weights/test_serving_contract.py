"""What SGLang and vLLM demand of a drafter's folder, held for every folder that is exported here.

The rule was read in the sources of SGLang 0.5.23 and vLLM 0.33 and is written down again, without ours: both skip
tensors they do not know and leave those that are missing at random, so the names have to be exactly these.
"""

import dataclasses
import json

import pytest
from safetensors import safe_open

from domino_jax import export
from domino_jax.weights import servers
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.target import read_target_config
from tests.helpers.golden_files import folder_of
from tests.helpers.models import MARKOV_SETS
from tests.helpers.paths import GOLDEN, ROOT
from tests.helpers.public_drafter import public_shapes, without_head
from tests.helpers.report_runs import RECIPE

HUB_ID = "owner/target"


def shapes_of(folder):
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}


def assert_sglang_opens(folder):
    raw = json.loads((folder / "config.json").read_text())
    nested = raw["dflash_config"]
    markov = nested.get("projector_type") == "dspark"
    assert raw["architectures"] == ["DSparkDraftModel" if markov else "DFlashDraftModel"]
    assert raw["model_type"] == "qwen3"
    assert type(raw["block_size"]) is int and raw["block_size"] > 1
    assert type(nested["mask_token_id"]) is int and 0 <= nested["mask_token_id"] < raw["vocab_size"]
    assert nested["target_layer_ids"] and all(0 <= i < raw["num_target_layers"] for i in nested["target_layer_ids"])
    assert set(raw["layer_types"]) == {"full_attention"} and len(raw["layer_types"]) == raw["num_hidden_layers"]
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"]
    if markov:  # of its keys the servers read those at the top level
        assert raw["markov_head_type"] in ("vanilla", "gated", "rnn") and raw["markov_rank"] >= 1
        assert type(raw["enable_confidence_head"]) is type(raw["confidence_head_with_markov"]) is bool
    elif "projector_type" in nested:
        assert nested["projector_type"] == "domino"
        assert type(nested["shift_label"]) is bool and nested["pure_draft_prefix_len"] == 1
        assert nested["gru_hidden_dim"] >= 1 and nested["emb_dim"] >= 1
    else:  # plain DFlash is unshifted there, whatever the file says
        assert nested["shift_label"] is False and not raw.get("sample_from_anchor")
    assert shapes_of(folder) == public_shapes(raw)


def drafter(name, head, **changes):
    config, params = load_drafter(GOLDEN / name / "drafter", read_target_config(folder_of(name, "target")), "float32")
    if not head:
        config, params = without_head(config), {"backbone": params["backbone"]}
    return dataclasses.replace(config, **changes), params


SERVED = {
    "Domino, shifted": ("tied_shift", True, {}),
    "Domino, unshifted": ("untied_noshift", True, {}),
    "DFlash": ("untied_noshift", False, {}),
    "DFlash, causal": ("untied_noshift", False, {"is_causal": True}),
}
NOT_SERVED = {
    "Domino, prefix 0": ("tied_shift", True, {"pure_draft_prefix_len": 0}, "requires pure_draft_prefix_len 1"),
    "Domino, prefix 2": ("tied_shift", True, {"pure_draft_prefix_len": 2}, "this drafter has 2"),
    "DFlash, shifted": ("tied_shift", False, {"shift_label": True}, "draft one position late"),
}


def written(tmp_path, config, params, target=HUB_ID, **choices):
    export.write_export(tmp_path / "out", config, params, {**RECIPE, "target": {"path": target}}, 1, **choices)
    return tmp_path / "out", (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("target", [HUB_ID, "./models/target"])
@pytest.mark.parametrize("case", SERVED)
def test_an_export_opens_in_sglang_and_its_card_has_the_command(tmp_path, case, target):
    name, head, changes = SERVED[case]
    config, params = drafter(name, head, **changes)
    folder, card = written(tmp_path, config, params, target)
    assert_sglang_opens(folder)
    assert servers.serving_note(config) is None
    public = HUB_ID if target == HUB_ID else "target"
    assert f"sglang.launch_server --model-path {public} --speculative-algorithm DFLASH --speculative-draft" in card
    fewer = f"drafts {config.block_size - 1} of a block of {config.block_size}, so a round there emits at most" in card
    assert fewer == config.shift_label  # an unshifted block drafts the same number here
    assert ("vLLM does not serve" in card) == head


def test_a_card_names_a_target_of_the_hub_as_its_base_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/target").mkdir(parents=True)
    cached = "/home/me/.cache/hub/models--Qwen--Qwen3-8B/snapshots/0123"
    ids = {HUB_ID: HUB_ID, f"{HUB_ID}@main": HUB_ID, cached: "Qwen/Qwen3-8B", "models/target": None, "/data/t": None}
    assert {path: servers.hub_id(path) for path in ids} == ids
    assert "base_model" not in written(tmp_path, *drafter("tied_shift", True), "models/target")[1]


@pytest.mark.parametrize("case", NOT_SERVED)
def test_a_drafter_that_no_server_drafts_with_has_a_note_and_in_its_card(tmp_path, case):
    name, head, changes, reason = NOT_SERVED[case]
    config, params = drafter(name, head, **changes)
    folder, card = written(tmp_path, config, params)
    assert reason in servers.serving_note(config)
    assert f"SGLang does not serve this drafter: {servers.server_refusals(config)[0]}." in card
    assert "sglang.launch_server" not in card and "vLLM does not serve" in card
    drafts = f'"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": {config.num_drafts}'
    assert ("pip install ./integrations/vllm" in card) == (drafts in card) == head  # Domino's plug-in
    with pytest.raises(AssertionError):
        assert_sglang_opens(folder)
    # Read here all the same.
    assert (
        load_drafter(folder, read_target_config(GOLDEN / name / "target"), "float32")[0].to_dict() == config.to_dict()
    )
    raw = json.loads((folder / "config.json").read_text())
    assert raw.get("sample_from_anchor") is (True if not head else None)


@pytest.mark.parametrize("name", ["tiny_domino", "smollm2_domino"])
def test_a_shipped_drafter_opens_in_sglang(name):
    assert_sglang_opens(ROOT / "assets" / name)


@pytest.mark.parametrize("name", MARKOV_SETS)
def test_markov_drafters_open_in_sglang_and_the_vanilla_ones_in_vllm(tmp_path, name):
    target = read_target_config(folder_of(name, "target"))
    config, params = load_drafter(GOLDEN / name / "drafter", target, "float32")
    folder, card = written(tmp_path, config, params)
    assert_sglang_opens(folder)
    assert servers.serving_note(config) is None
    assert "--speculative-algorithm DSPARK --speculative-draft-model-path THIS_FOLDER\n" in card
    settings = '"method": "dspark", "model": "THIS_FOLDER", "num_speculative_tokens": 7'
    assert (settings in card) == (config.markov_head_type == "vanilla")


@pytest.mark.parametrize("shifted", [False, True])
def test_vllm_opens_unshifted_xpress_drafters(tmp_path, shifted):
    """The keys that vLLM 0.33 reads: its DFlash method, whose mixer holds one slot more than it drafts."""
    config, params = drafter("xpress", True, shift_label=shifted)
    folder, card = written(tmp_path, config, params)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3XPressModel"] and raw["sample_from_anchor"] == shifted
    assert {"mask_token_id", "target_layer_ids"} <= raw["dflash_config"].keys()
    assert (raw["xpress_block_size"], raw["xpress_topc"]) == (config.block_size, 0)
    settings = f'"method": "dflash", "model": "THIS_FOLDER", "num_speculative_tokens": {config.block_size - 1}'
    assert ("vLLM (0.33 or later):" in card and settings in card) is not shifted
    assert (servers.serving_note(config) is not None) == shifted
