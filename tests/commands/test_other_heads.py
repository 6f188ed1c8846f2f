"""train.py with the other heads on a golden target: evaluated, exported, decoded, continued exactly."""

import json
import shutil

import numpy as np
import pytest

from domino_jax import export
from domino_jax.data.token_counts import frequent_tokens
from domino_jax.method.kinds import parse_config
from domino_jax.recipe import cli
from domino_jax.training.metrics import read_rows
from domino_jax.weights.draft_vocab import read_order
from domino_jax.weights.drafter import load_drafter
from tests.helpers.golden_files import target_config
from tests.helpers.models import ROW_SETS
from tests.helpers.train_runs import (
    CASES,
    DOMINO,
    arguments,
    interrupted,
    losses,
    shared_folder,
    start,
    train_once,
    weights,
)

STEPS = 4
CHOICES = {
    "config__data__layout": "pack",
    "config__data__max_length": 112,
    "config__train__steps": STEPS,
    "config__train__ema_decay": 0.5,
    "config__checkpoint__every": 2,
    "config__eval__every": 4,
    "config__eval__final": True,
}
DRAFTERS = {
    "dflash2": {"drafter.dflash2.rank": 8},
    "markov": {"drafter.markov.rank": 8, "drafter.markov.head_type": "rnn"},
    "xpress": {"drafter.xpress.rank": 8},
    "eagle3": {
        "drafter.eagle3.draft_vocab_size": 48,
        "drafter.eagle3.passes": 2,
        "drafter.target_layer_ids": "(1,2,4)",
    },
    "medusa": {"drafter.medusa.num_heads": 3, "decode.draft_vocab": 128},
}
# What each head logs beside the rest.
LOGGED = {
    "dflash2": {"selector_loss", "selector_coverage", "serving_accept_len", "oracle_accept_len"},
    "markov": {"l1_loss", "confidence_loss", "tau_probabilistic"},
    "xpress": {"tf_loss", "consistency_loss", "base_anchor_loss"},
    **dict.fromkeys(ROW_SETS, {"loss_1", "accuracy_2", "accept_len"}),
}
SLOW = ("markov", "xpress")
heads = pytest.mark.parametrize(
    "head", [pytest.param(head, marks=[pytest.mark.slow] * (head in SLOW)) for head in DRAFTERS]
)


def command(head: str, files, workdir) -> list[str]:
    drafter = {} if head in ROW_SETS else DOMINO
    drafter = drafter | {"config.drafter.head": head} | {f"config.{key}": DRAFTERS[head][key] for key in DRAFTERS[head]}
    changes = {**CHOICES, "config__train__accumulate": 2 if head == "dflash2" else 1}
    return arguments(files, workdir, drafter, **changes)


@pytest.fixture(scope="session")
def finished(finished_run, tmp_path_factory):
    """A function from a head to the workdir of its run."""
    folder = shared_folder(tmp_path_factory)
    return lambda head: train_once(folder / head, lambda fresh: command(head, finished_run.files, fresh))


@heads
def test_a_run_evaluates_exports_and_decodes(finished, head):
    rows = read_rows(finished(head) / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all({"grad_norm", *LOGGED[head]} <= row.keys() for row in steps)
    [judged] = [row for row in rows if "eval_tau" in row]
    assert 1.0 <= judged["eval_tau"] <= 4.0 and judged["eval_identical"] == 1.0
    assert ("eval_tau_backbone" in judged) == (head not in ROW_SETS)
    report = json.loads((finished(head) / "report" / "report.json").read_text())
    assert report["identical_outputs"]["draft"]["same"] == 2
    assert report["drafter"]["head"] == head and report["round_widths"]["draft"] == 4
    if head == "medusa":
        assert report["drafter"]["draft_vocab_bytes"] == 128 * 4 * target_config("tied_shift").hidden_size
    for name in ("plots/losses.png", "plots/tau.png"):
        assert (finished(head) / name).stat().st_size > 500, name


def test_the_selector_is_trained_as_the_recipe_has_it_and_exported_with_its_sizes(finished):
    rows = [row for row in read_rows(finished("dflash2") / "metrics.jsonl") if "loss" in row]
    for row in rows:
        # A new drafter's candidates may hold no label at all.
        assert (row["selector_loss"] > 0) == (row["selector_coverage"] > 0)
        assert 1 <= row["serving_accept_len"] <= row["oracle_accept_len"] <= 4
    config, _ = load_drafter(finished("dflash2"), target_config("tied_shift"), "float32")
    assert (config.head, config.conv_kernel_size, config.selector_top_k) == ("dflash2", 2, 16)
    raw = json.loads((finished("dflash2") / "export" / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"] and parse_config(raw) == config


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_the_answers(finished):
    config, _ = load_drafter(finished("eagle3") / "export", target_config("tied_shift"), "float32")
    counts = np.bincount([token for case in CASES for token in case["output"]], minlength=260)
    expected = np.sort(np.argsort(-counts, kind="stable")[:48])
    assert config.draft_tokens.tolist() == expected.tolist() and counts[expected].sum() > 200
    order = read_order(finished("medusa") / "export", 260)
    assert frequent_tokens(order, 260, 48).tolist() == expected.tolist()


@heads
def test_a_run_that_is_cut_off_continues_exactly(finished, finished_run, tmp_path, head):
    """From the checkpoint of step 2, with the rows after it dropped."""
    workdir = interrupted(finished(head), tmp_path / "again", 2)
    flags = ["--config.eval.every=0", "--config.eval.final=False"]
    assert start([*command(head, finished_run.files, workdir), *flags]) == 0
    assert losses(workdir) == losses(finished(head)) and weights(workdir) == weights(finished(head))


def test_a_run_with_another_draft_vocabulary_is_not_continued(finished, finished_run, tmp_path, capsys):
    """Its shapes are the same, but the rows of the lm_head were trained for other tokens."""
    workdir = interrupted(finished("eagle3"), tmp_path / "again", 2)
    config = json.loads((workdir / "drafter_config.json").read_text())
    config["draft_tokens"][-1] += 1
    (workdir / "drafter_config.json").write_text(json.dumps(config))
    assert start(command("eagle3", finished_run.files, workdir)) == 3
    assert "was trained for other tokens" in capsys.readouterr().err
    assert json.loads((workdir / "drafter_config.json").read_text()) == config


def export_from(workdir, output) -> int:
    with pytest.raises(SystemExit) as left:
        cli.run(export.main, ("workdir", "output"), (), ["export", f"--workdir={workdir}", f"--output={output}"])
    return left.value.code


@pytest.mark.parametrize("head", ROW_SETS)
def test_the_export_command_writes_what_the_run_wrote(finished, tmp_path, head):
    assert export_from(finished(head), tmp_path / "out") == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights(finished(head))


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
    shutil.copytree(finished(head), tmp_path / "run")
    path = tmp_path / "run" / "drafter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert export_from(path.parent, tmp_path / "out") == 3
    printed = capsys.readouterr().err
    assert message in printed and "drafter_config.json" in printed
    assert len(printed.strip().splitlines()) <= 5 and not (tmp_path / "out").exists()
