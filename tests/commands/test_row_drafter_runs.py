"""train.py with EAGLE-3 and Medusa on a golden target: evaluated, exported, decoded, continued exactly."""

import json
import shutil

import numpy as np
import pytest

from domino_jax import export
from domino_jax.data.token_counts import frequent_tokens
from domino_jax.evals import measure
from domino_jax.method.kinds import ROW_DRAFTERS
from domino_jax.recipe import cli
from domino_jax.training.metrics import read_rows
from domino_jax.weights.draft_vocab import read_order
from domino_jax.weights.drafter import load_drafter
from tests.helpers.golden_files import target_config
from tests.helpers.train_runs import CASES, arguments, start, training_files

STEPS = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return training_files(tmp_path_factory.mktemp("rows"))


def run(head, files, workdir) -> int:
    """The exit code of a run in this process."""
    drafter = {
        "config.drafter.head": head,
        "config.drafter.eagle3.draft_vocab_size": 48,
        "config.drafter.medusa.num_heads": 3,
        "config.drafter.eagle3.passes": 2,
    }
    choices = {
        "config__data__layout": "pack",
        "config__data__max_length": 112,
        "config__train__steps": STEPS,
        "config__train__ema_decay": 0.5,
        "config__checkpoint__every": 2,
        "config__eval__every": 4,
        "config__eval__final": True,
        "config__preflight__rows": 0,
    }
    if head == "eagle3":
        drafter["config.drafter.target_layer_ids"] = "(1,2,4)"
    else:
        drafter["config.decode.draft_vocab"] = 128
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measure, "time_rounds", lambda *_: {})
        return start(arguments(files, workdir, drafter, **choices))


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    """head → the workdir of a whole run."""
    folders = {}
    for head in ROW_DRAFTERS:
        folders[head] = tmp_path_factory.mktemp("finished") / head
        assert run(head, files, folders[head]) == 0
    return folders


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_a_run_evaluates_exports_and_decodes(finished, head):
    rows = read_rows(finished[head] / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all({"loss_1", "accuracy_2", "accept_len", "grad_norm"} <= row.keys() for row in steps)
    [judged] = [row for row in rows if "eval_tau" in row]
    assert 1.0 <= judged["eval_tau"] <= 4.0 and judged["eval_identical"] == 1.0 and "eval_tau_backbone" not in judged
    report = json.loads((finished[head] / "report" / "report.json").read_text())
    assert report["identical_outputs"]["draft"]["same"] == 2
    assert report["drafter"]["head"] == head and report["round_widths"] == {"draft": 4}
    assert (
        head == "eagle3" or report["drafter"]["draft_vocab_bytes"] == 128 * 4 * target_config("tied_shift").hidden_size
    )
    for name in ("plots/losses.png", "plots/tau.png"):
        assert (finished[head] / name).stat().st_size > 500, name
    card = (finished[head] / "export" / "README.md").read_text()
    assert {"eagle3": "--speculative-algorithm EAGLE3", "medusa": "vLLM does not serve this drafter"}[head] in card
    assert "drafts a round" in card


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_the_answers(finished):
    config, _ = load_drafter(finished["eagle3"] / "export", target_config("tied_shift"), "float32")
    counts = np.bincount([token for case in CASES for token in case["output"]], minlength=260)
    expected = np.sort(np.argsort(-counts, kind="stable")[:48])
    assert config.draft_tokens.tolist() == expected.tolist() and counts[expected].sum() > 200
    order = read_order(finished["medusa"] / "export", 260)
    assert frequent_tokens(order, 260, 48).tolist() == expected.tolist()


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_a_run_that_is_cut_off_continues_exactly(finished, files, tmp_path, head):
    """From the checkpoint of step 2, with the rows after it dropped."""
    workdir = tmp_path / "again"
    shutil.copytree(finished[head], workdir)
    for name in ("checkpoints/4", "export", "report"):
        shutil.rmtree(workdir / name)
    (workdir / "finished.json").unlink()
    assert run(head, files, workdir) == 0
    for file in ("export/model.safetensors", "export/config.json"):
        assert (workdir / file).read_bytes() == (finished[head] / file).read_bytes()
    ours, theirs = (
        [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]
        for folder in (workdir, finished[head])
    )
    assert ours == theirs


def test_a_run_with_another_draft_vocabulary_is_not_continued(finished, files, tmp_path, capsys):
    """Its shapes are the same, but the rows of the lm_head were trained for other tokens."""
    workdir = tmp_path / "again"
    shutil.copytree(finished["eagle3"], workdir)
    shutil.rmtree(workdir / "checkpoints" / "4")
    (workdir / "finished.json").unlink()
    config = json.loads((workdir / "drafter_config.json").read_text())
    config["draft_tokens"][-1] += 1
    (workdir / "drafter_config.json").write_text(json.dumps(config))
    assert run("eagle3", files, workdir) == 3
    assert "was trained for other tokens" in capsys.readouterr().err
    assert json.loads((workdir / "drafter_config.json").read_text()) == config


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_the_export_command_writes_what_the_run_wrote(finished, tmp_path, head):
    argv = ["export", f"--workdir={finished[head]}", f"--output={tmp_path / 'out'}"]
    with pytest.raises(SystemExit) as left:
        cli.run(export.main, ("workdir", "output"), ("format",), argv)
    assert left.value.code == 0
    written, exported = (
        (folder / "model.safetensors").read_bytes() for folder in (tmp_path / "out", finished[head] / "export")
    )
    assert written == exported


@pytest.mark.parametrize(
    ("head", "changes", "message"),
    [
        ("eagle3", {"draft_tokens": None}, "draft_vocab_size 48 and lacks draft_tokens"),
        ("eagle3", {"draft_vocab_size": 47}, "has 48 tokens, but draft_vocab_size is 47"),
        ("medusa", {"num_heads": 2}, "['heads_2']['layers_0']['linear']['kernel'] is [64, 64], and by"),
        ("medusa", {"num_heads": 4}, "['kernel'] is not there, and by the file it is [64, 64]"),
    ],
)
def test_a_workdir_whose_drafter_config_was_edited_is_refused(finished, tmp_path, capsys, head, changes, message):
    shutil.copytree(finished[head], tmp_path / "run")
    path = tmp_path / "run" / "drafter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(SystemExit) as left:
        cli.run(
            export.main, ("workdir", "output"), (), ["export", f"--workdir={path.parent}", f"--output={tmp_path}/o"]
        )
    printed = capsys.readouterr().err
    assert left.value.code == 3 and message in printed and "drafter_config.json" in printed
    assert len(printed.strip().splitlines()) <= 5 and not (tmp_path / "o").exists()
