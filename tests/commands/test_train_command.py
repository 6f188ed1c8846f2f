"""train.py end to end on a golden target: what a workdir holds, resuming, refusing, and the chain from loss to τ."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from domino_jax.recipe import builders, cli
from domino_jax.runtime.agreement import only_run
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.journal import locked
from domino_jax.training.metrics import read_rows
from tests.helpers.environment import optimizing
from tests.helpers.models import rewrite_tensors
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import CASES, GOLDEN, STEPS, arguments, interrupted, losses, start, weights, write_rows

LOGGED = ("base_loss", "final_loss", "lambda_base", "learning_rate", "grad_norm", "accept_len", "base_accept_len")
LOGGED += ("seconds",)


@pytest.fixture
def files(finished_run):
    return finished_run.files


@pytest.fixture
def finished(finished_run):
    return finished_run.workdir


def test_a_run_leaves_the_documented_files_rows_and_report(finished):
    names = ["config.json", "metrics.jsonl", "checkpoints/8", "export/config.json", "export/model.safetensors"]
    names += ["report/report.json", "report/report.html", "report/generations.jsonl", "tensorboard"]
    assert [name for name in names if not (finished / name).exists()] == []
    rows = read_rows(finished / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(set(LOGGED) <= row.keys() for row in steps)
    assert [row["lambda_base"] for row in steps] == [1 - step / STEPS for step in range(STEPS)]
    judged = [row for row in rows if "eval_tau" in row]
    assert [row["step"] for row in judged] == [8]
    assert all(1.0 <= row["eval_tau"] <= 4.0 and 1.0 <= row["eval_tau_backbone"] <= 4.0 for row in judged)
    assert [len(row["eval_accept_by_position"]) for row in judged] == [3]
    report = json.loads((finished / "report" / "report.json").read_text())
    same = {"same": 2, "of": 2}
    found = {mode: {key: count[key] for key in same} for mode, count in report["identical_outputs"].items()}
    assert found == {"backbone": same, "domino": same}
    assert report["round_widths"] == {"backbone": 4, "domino": 4}
    assert "a round can emit at most 4 tokens" in (finished / "export" / "README.md").read_text()


@pytest.mark.long
def test_without_named_prompts_the_run_is_judged_by_prompts_held_out_of_its_rows(tmp_path, capsys):
    case = CASES[0]
    ids = [[first, *case["prompt"][1:], *case["output"]] for first in range(40, 64)]
    mask = [0] * len(case["prompt"]) + [1] * len(case["output"])
    rows = write_rows(tmp_path / "rows.jsonl", [{"token_ids": row, "loss_mask": mask} for row in ids])
    argv = arguments((rows, ""), tmp_path / "run", config__eval__every=2)
    assert start([*argv, "--config.train.steps=2"]) == 0
    assert "held out for evaluation: 1 prompts, 1 rows with these prompts" in capsys.readouterr().out
    stored = (tmp_path / "run" / "held_out.jsonl").read_text()
    held_out = json.loads(stored)["token_ids"]
    assert held_out[1:] == case["prompt"][1:]
    measured = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "eval_tau" in row]
    assert [row["step"] for row in measured] == [2] and measured[0]["eval_seconds"] > 0
    # It continues with other rows and more steps: the same prompts judge it, and the pre-flight reads the new rows.
    others = [row for row in ids if row[0] != held_out[0]][:12]
    write_rows(tmp_path / "rows.jsonl", [{"token_ids": row, "loss_mask": mask} for row in others])
    assert start([*argv, "--config.train.steps=4", "--allow_config_change=data.train,train.steps"]) == 0
    printed = capsys.readouterr().out
    assert "the rows are others than those of steps 1 to 2" in printed and "pre-flight" in printed
    assert "train.steps was 2 and is 4: the learning rate goes on at " in printed
    assert (tmp_path / "run" / "held_out.jsonl").read_text() == stored
    assert json.loads((tmp_path / "run" / "preflight.json").read_text())["data"]["rows_read"] == 12
    assert "12 rows" in (tmp_path / "run" / "export" / "README.md").read_text()
    config = cli.parse(["train", *argv], ("config", "workdir"), ("distributed",)).config
    no_rows = types.SimpleNamespace(num_read=3, held_out_prompts=list)
    with pytest.raises(DataError, match="too few to hold prompts out"):
        builders.evaluation_rows(config, no_rows, print)


def test_a_run_that_was_cut_off_continues_bit_for_bit(files, finished, tmp_path):
    """From the checkpoint of step 4, with the rows after it dropped."""
    workdir = interrupted(finished, tmp_path / "again", 4)
    assert start(arguments(files, workdir, config__eval__every=8)) == 0
    assert losses(workdir) == losses(finished)
    assert weights(workdir) == weights(finished)


def test_another_target_under_the_same_path_ends_a_finished_and_a_continued_run(files, finished, tmp_path, capsys):
    target = shutil.copytree(GOLDEN / "target", tmp_path / "target")
    changes = {"config__eval__every": 8, "config__eval__final": True, "config__target__path": target}
    argv = arguments(files, finished, **changes)
    assert start(argv) == 0  # the same model elsewhere
    rewrite_tensors(target, {"model.layers.3.self_attn.q_proj.weight": np.negative})
    for words in (argv, [*argv, f"--workdir={interrupted(finished, tmp_path / 'cut', 4)}"]):
        assert start(words) == 2
        message = capsys.readouterr().err
        assert "trained for another target" in message and "target.weights: " in message
        assert "--allow_config_change=target.path" in message and len(message.splitlines()) <= 5


def test_a_second_run_on_a_workdir_is_refused_while_the_first_one_is_alive(files, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with locked(tmp_path / "run" / "run.lock"):
        assert start(arguments(files, tmp_path / "run", config__target__path="./nowhere")) == 2
    message = capsys.readouterr().err
    assert message == f"error: another run is writing {tmp_path / 'run'}; wait for it, or choose another --workdir.\n"
    assert not list((tmp_path / "run").iterdir())


def test_a_restart_by_a_launcher_waits_for_the_lock_of_the_run_that_was_lost(tmp_path, monkeypatch):
    lost = contextlib.ExitStack()
    lost.enter_context(only_run(tmp_path))
    with pytest.raises(DominoError, match="another run is writing"), only_run(tmp_path):
        pass
    monkeypatch.setenv("DOMINO_RESTARTED", "1")
    threading.Timer(1.0, lost.close).start()
    with only_run(tmp_path):
        assert (tmp_path / "run.lock").exists()
    assert not (tmp_path / "run.lock").exists()


def test_a_changed_recipe_is_refused_field_by_field(files, finished, capsys):
    recipe = (finished / "config.json").read_bytes()
    assert start(arguments(files, finished, config__eval__final=True, config__train__learning_rate=0.5)) == 2
    message = capsys.readouterr().err
    assert "train.learning_rate" in message and "0.5" in message
    assert (finished / "config.json").read_bytes() == recipe


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("drafter.mask_token_id", 260, "260"),
        ("drafter.target_layer_ids", "(1,5)", "--config.drafter.target_layer_ids"),
    ],
)
def test_a_mistake_is_one_short_message(files, tmp_path, capsys, key, value, expected):
    assert start([*arguments(files, tmp_path / "run"), f"--config.{key}={value}"]) == 2
    message = capsys.readouterr().err
    assert expected in message and "Traceback" not in message and len(message.splitlines()) <= 5


@pytest.mark.parametrize("when", [{"config__eval__every": 1}, {"config__eval__final": True}])
def test_prompts_that_an_evaluation_cannot_use_are_listed_before_training(files, tmp_path, capsys, when):
    bad = [{"id": "text", "prompt": "a"}, {"id": "other", "prompt": "b"}]  # the target has no tokenizer
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"token_ids": [40, 41]}, *bad])
    argv = arguments((files[0], prompts), tmp_path / "run", config__eval__num_prompts=8, **when)
    assert start(argv) == 3
    message = capsys.readouterr().err
    assert "prompt text: " in message and "2 of 3 rows" in message and "Traceback" not in message
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.long
def test_answers_that_are_named_are_judged_if_they_are_the_targets(files, tmp_path, capsys):
    strange = [{"id": "s", "token_ids": [40, *range(100, 130)], "loss_mask": [0] * 5 + [1] * 26}]
    few = {"config__eval__every": 1, "config__train__steps": 1}
    named = write_rows(tmp_path / "strange.jsonl", strange)
    assert start(arguments(files, tmp_path / "refused", config__eval__answers=named, **few)) == 3
    message = capsys.readouterr().err
    assert f"{named}: 0.0% of the answers' tokens" in message and "token 0 of the answer in row s" in message
    assert len(message.splitlines()) == 2 and not (tmp_path / "refused" / "checkpoints").exists()
    assert start(arguments(files, tmp_path / "run", config__eval__answers=files[0], **few)) == 0
    [row] = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "eval_tau" in row]
    assert row["eval_tau"] >= 1
    assert not list((tmp_path / "run").glob("held_out*"))


def run_process(argv: list[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "domino_jax.train", *argv]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow(minutes=6)
def test_overfitting_rows_reaches_a_decoded_tau_near_the_cap(tmp_path):
    """From anchors to acceptance: on 32 rows learnt by heart a drafter of block 8 must come near its cap of 9."""
    prompts = tmp_path / "prompts.jsonl"
    lines = (ROOT / "assets" / "tiny_qwen3" / "prompts_train.jsonl").read_text().splitlines()
    prompts.write_text("\n".join(lines[:32]) + "\n")
    # Rows whole: what is cut off is not learnt, and drags τ down where it is decoded.
    keys = {"data.train": prompts, "eval.prompts": prompts, "data.max_length": 320, "data.layout": "pad"}
    keys |= {"train.steps": 250, "train.batch_size": 8, "train.num_anchors": 48, "checkpoint.every": 250}
    keys |= {"eval.every": 0, "decode.num_prompts": 32, "decode.modes": "('autoregressive','domino')"}
    argv = [f"--config={ROOT / 'configs' / 'tiny.py'}", f"--workdir={tmp_path / 'run'}", "--distributed=off"]
    run_process([*argv, *(f"--config.{key}={value}" for key, value in keys.items())], optimizing())
    rows = [json.loads(line) for line in (tmp_path / "run/report/generations.jsonl").read_text().splitlines()]
    # The last round of an answer is cut by its end and is no measure of the drafter.
    rounds = [n for row in rows if row["mode"] == "domino" for n in row["accept_lengths"][:-1]]
    assert len(rounds) > 100 and np.mean(rounds) > 0.9 * 9


@pytest.mark.slow
def test_a_run_over_fsdp_evaluates_and_decodes_at_the_end_with_the_targets_texts(files, tmp_path):
    few = {"config__train__steps": 1, "config__decode__max_new_tokens": 8}
    modes = "('autoregressive','domino')"
    judged = {"config__eval__every": 1, "config__eval__final": True, "config__decode__modes": modes}
    argv = arguments(files, tmp_path / "run", config__mesh__fsdp=-1, **few, **judged)
    run_process(argv, os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"})
    [row] = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "eval_tau" in row]
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    assert report["identical_outputs"]["domino"]["same"] == report["identical_outputs"]["domino"]["of"] == 2
