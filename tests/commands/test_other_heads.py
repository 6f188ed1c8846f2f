"""train.py with the other heads on a golden target: evaluated, exported, decoded, continued exactly."""

import json

import numpy as np
import pytest

from domino_jax.data.token_counts import frequent_tokens
from domino_jax.training.metrics import read_rows
from domino_jax.weights.draft_vocab import read_order
from domino_jax.weights.drafter import load_drafter
from tests.helpers.commands import run
from tests.helpers.golden_files import target_config
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

pytestmark = pytest.mark.long

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
    "dflash2": {"drafter.dflash2.rank": 8, "decode.draft_vocab": 128},
    "markov": {"drafter.markov.rank": 8, "drafter.markov.head_type": "rnn"},
    "xpress": {"drafter.xpress.rank": 8},
    "eagle3": {
        "drafter.eagle3.draft_vocab_size": 48,
        "drafter.eagle3.passes": 2,
        "drafter.target_layer_ids": "(1,2,4)",
    },
}
# Fields that each head logs beside the rest.
LOGGED = {
    "dflash2": {"selector_loss", "selector_coverage"},
    "markov": {"l1_loss", "confidence_loss", "tau_probabilistic"},
    "xpress": {"tf_loss", "consistency_loss", "base_anchor_loss"},
    "eagle3": {"loss_1", "accuracy_2", "accept_len"},
}
SLOW = ("markov", "xpress")
heads = pytest.mark.parametrize(
    "head", [pytest.param(head, marks=[pytest.mark.slow] * (head in SLOW)) for head in DRAFTERS]
)


def command(head: str, files, workdir) -> list[str]:
    drafter = {} if head == "eagle3" else DOMINO
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
    assert 1.0 <= judged["eval_tau"] <= 4.0
    assert ("eval_tau_backbone" in judged) == (head != "eagle3")
    report = json.loads((finished(head) / "report" / "report.json").read_text())
    assert report["identical_outputs"]["draft"]["same"] == 2
    assert report["drafter"]["head"] == head and report["round_widths"]["draft"] == 4
    assert bool(report["settings"]["draft_vocab"]) == (head == "dflash2")
    for name in ("plots/losses.png", "plots/tau.png", "plots/tau_by_width.png"):
        assert (finished(head) / name).stat().st_size > 500, name


def test_the_draft_vocabulary_is_the_most_frequent_tokens_of_the_answers(finished):
    config, _ = load_drafter(finished("eagle3") / "export", target_config("tied_shift"), "float32")
    counts = np.bincount([token for case in CASES for token in case["output"]], minlength=260)
    expected = np.sort(np.argsort(-counts, kind="stable")[:48])
    assert config.draft_tokens.tolist() == expected.tolist() and counts[expected].sum() > 200
    order = read_order(finished("dflash2") / "export", 260)
    assert frequent_tokens(order, 260, 48).tolist() == expected.tolist()


def test_a_run_with_packed_rows_and_an_average_that_is_cut_off_continues_exactly(finished, finished_run, tmp_path):
    """From the checkpoint of step 2, with the rows after it dropped."""
    whole = finished("dflash2")
    workdir = interrupted(whole, tmp_path / "again", 2)
    flags = ["--config.eval.every=0", "--config.eval.final=False"]
    assert start([*command("dflash2", finished_run.files, workdir), *flags]) == 0
    assert losses(workdir) == losses(whole) and weights(workdir) == weights(whole)


def test_a_run_that_continues_keeps_its_draft_vocabulary(finished, finished_run, tmp_path):
    """The rows of its lm_head were trained for these tokens, and other rows of data do not change them."""
    workdir = interrupted(finished("eagle3"), tmp_path / "again", 2)
    config = json.loads((workdir / "drafter_config.json").read_text())
    config["draft_tokens"][-1] += 1
    (workdir / "drafter_config.json").write_text(json.dumps(config))
    assert start(command("eagle3", finished_run.files, workdir)) == 0
    assert json.loads((workdir / "drafter_config.json").read_text()) == config


def test_the_export_command_writes_what_the_run_wrote(finished, tmp_path):
    assert run("export", f"--workdir={finished('eagle3')}", f"--output={tmp_path / 'out'}") == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights(finished("eagle3"))
