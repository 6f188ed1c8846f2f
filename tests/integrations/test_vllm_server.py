"""Servers of vLLM's CPU build, with the plug-in and without its head, are judged as `evaluate --server` says.

VLLM_PYTHON names the Python of an environment with that build (CONTRIBUTING.md).
"""

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers.answering import assert_full_blocks, overfit
from tests.helpers.commands import run
from tests.helpers.paths import ROOT
from tests.helpers.vllm_server import vllm_server
from tests.processes.test_engines import PYTHON


def prefix_of_all(folder, scratch):
    """The drafter with a config.json that leaves every draft to the base logits: its head is not used."""
    copy = shutil.copytree(folder, scratch / "without_head")
    raw = json.loads((copy / "config.json").read_text())
    raw["dflash_config"]["pure_draft_prefix_len"] = raw["block_size"]
    (copy / "config.json").write_text(json.dumps(raw))
    return copy


def as_dflash(folder, scratch):
    """The backbone as a folder of plain DFlash, which the engine takes for an unshifted one."""
    copy = shutil.copytree(folder, scratch / "dflash")
    tensors = load_file(copy / "model.safetensors")
    backbone = {name: leaf for name, leaf in tensors.items() if not name.startswith(("prefix_gru", "embed_proj"))}
    save_file(backbone, copy / "model.safetensors", {"format": "pt"})
    raw = json.loads((copy / "config.json").read_text())
    kept = {name: raw["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
    raw |= {"architectures": ["DFlashDraftModel"], "dflash_config": kept}
    (copy / "config.json").write_text(json.dumps(raw))
    return copy


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize(
    ("port", "change", "drafts", "hint"),
    [(8701, None, 8, None), (8702, prefix_of_all, 8, "the head is missing"), (8703, as_dflash, 7, "check the shift")],
    ids=["domino", "without the head", "plain DFlash of a shifted drafter"],
)
def test_evaluate_checks_a_server_of_the_engine(plugin, tmp_path, port, change, drafts, hint):
    target, drafter = ROOT / "assets" / "tiny_qwen3", ROOT / "assets" / "tiny_domino"
    served = change(drafter, tmp_path) if change else drafter
    flags = ["--config=tiny", "--config.decode.num_prompts=12", "--config.decode.max_new_tokens=96"]
    with vllm_server(PYTHON, tmp_path, plugin, port, target, served, drafts) as url:
        code = run("evaluate", f"--server={url}", f"--output={tmp_path / 'out'}", *flags)
    evaluation = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    texts, [figures] = evaluation["server"]["texts"], evaluation["drafters"].values()
    tau = figures["server"]
    assert (code, texts["own"], texts["wrong"]) == (0, 12, 0)
    # The engine's template thinks unless a request says otherwise.
    assert evaluation["server"]["prompts"]["same"] == 0
    if hint:
        assert tau["tau"] < 0.9 * tau["tau_one_pass"] and hint in tau["hint"]
    else:
        assert tau["tau"] == tau["tau_one_pass"] and tau["hint"] is None


@pytest.mark.slow(minutes=5)
def test_an_overfitted_drafter_has_every_block_accepted_whole(plugin, tmp_path):
    target, metrics = ROOT / "assets" / "tiny_qwen3", "--per-request-spec-decode-metrics=summary"
    names = (metrics, "--served-model-name=tiny_qwen3")
    with vllm_server(PYTHON, tmp_path, plugin, 8704, target, overfit(tmp_path), 8, *names):
        assert_full_blocks(8704)
