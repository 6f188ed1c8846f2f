"""The campaign for accelerators, with tiny shapes on the CPU: what it writes, resumes, leaves out and survives."""

import json
import os
import sys

import pytest

from benchmarks.device import campaign as device_campaign
from benchmarks.device import smollm2
from domino_jax.runtime.errors import DominoError
from tests.helpers.paths import ASSETS

MEASURED = ["parity", "bandwidth", "train-public", "train-paper", "decode-small", "context-small", "batch-small"]
MEASURED += ["drafts-small", "eight_bits-small", "attention-small"]


def choices_of(folder, *flags):
    return device_campaign.parsed([f"--output={folder}", "--small", *flags])


def in_process(choices, name, left):
    device_campaign.run_phase(choices, name)


def unwanted(choices, name, left):
    raise AssertionError(f"{name} was begun")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a whole small campaign."""
    folder = tmp_path_factory.mktemp("campaign")
    assert device_campaign.campaign(choices_of(folder), in_process) == 0
    return folder


@pytest.fixture
def stubs(monkeypatch):
    """Two phases that measure nothing; {name: what it returns or raises}."""
    outcomes = {"first": {"value": 1}, "second": {"value": 2}}

    def measure(name):
        if isinstance(outcomes[name], Exception):
            raise outcomes[name]
        return outcomes[name]

    def all_phases(choices):
        return {name: device_campaign.Phase(3.0, lambda name=name: measure(name)) for name in outcomes}

    monkeypatch.setattr(device_campaign, "all_phases", all_phases)
    return outcomes


def record_of(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


# ------------------------------------------------------------------------------------------------ the small campaign


def test_every_phase_leaves_a_json_that_says_where_it_comes_from(folder):
    records = device_campaign.read_records(folder)
    assert sorted(records) == sorted(MEASURED)
    for record in records.values():
        assert {"phase", "device", "devices", "jax", "date", "commit", "variables", "seconds"} <= set(record)
        assert record["small"] is True and record["device"] == "cpu" and "failed" not in record


def test_the_table_has_rows_of_every_phase(folder):
    text = (folder / "summary.md").read_text()
    assert all(f"| {name} |" in text for name in MEASURED) and "None" not in text
    assert (folder / "data" / "device_campaign.csv").exists()


# -------------------------------------------------------------------------------------------- resuming, time, failures


def test_a_finished_campaign_measures_nothing_again(folder):
    assert device_campaign.campaign(choices_of(folder), unwanted) == 0


def test_a_phase_that_fails_is_recorded_and_the_next_one_runs(tmp_path, stubs):
    stubs["first"] = ValueError("too large\nmore")
    assert device_campaign.campaign(choices_of(tmp_path), in_process) == 1
    assert record_of(tmp_path, "first")["failed"] == "ValueError: too large"
    assert record_of(tmp_path, "second")["value"] == 2
    stubs["first"] = {"value": 5}
    assert device_campaign.campaign(choices_of(tmp_path), in_process) == 0
    assert record_of(tmp_path, "first")["value"] == 5


def test_figures_of_another_device_are_refused(tmp_path, stubs):
    device_campaign.write_record(tmp_path, "first", {"phase": "first", "device": "NVIDIA H200"})
    with pytest.raises(DominoError, match="measured with device NVIDIA H200, and here it is cpu"):
        device_campaign.campaign(choices_of(tmp_path), in_process)


# -------------------------------------------------------------------------------------------------- separate processes


@pytest.mark.parametrize(
    ("script", "left", "failed"),
    [
        ("#!/bin/sh\nkill -9 $$\n", float("inf"), "its process ended with -9 (see bandwidth.log)"),
        ("#!/bin/sh\nsleep 60\n", 0.3, "stopped after 0 s, when the minutes were over"),
    ],
)
def test_a_process_that_dies_or_overruns_is_a_failed_phase(tmp_path, monkeypatch, script, left, failed):
    python = tmp_path / "python"
    python.write_text(script)
    os.chmod(python, 0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    device_campaign.run_apart(choices_of(tmp_path), "bandwidth", left)
    assert record_of(tmp_path, "bandwidth")["failed"] == failed


# ------------------------------------------------------------------------------------------------------------- SmolLM2


@pytest.mark.slow(minutes=4)
def test_the_pipeline_answers_trains_and_decodes(tmp_path):
    """With the tiny recipe and the shipped target, whose folder has the same files."""
    flags = ["regenerate.num_prompts=8", "regenerate.max_new_tokens=24", "train.steps=3", "train.log_every=1"]
    flags += ["eval.every=0", "eval.final=False", "checkpoint.every=3"]
    flags += ["decode.num_prompts=2", "decode.max_new_tokens=16"]
    words = tuple(f"--config.{flag}" for flag in flags)
    tiny = {"recipe": "configs/tiny.py", "prompts": "assets/tiny_qwen3/prompts_train.jsonl"}
    pipeline = smollm2.Pipeline(ASSETS / "tiny_qwen3", tmp_path, words, **tiny)
    answers = smollm2.answers(pipeline)
    assert answers["rows"] == 8 and answers["tokens"] > 8
    trained = smollm2.training(pipeline)
    assert trained["step"] == 3
    decoded = smollm2.decoding(pipeline)
    assert decoded["modes"]["domino"]["tau_pooled"] >= 1
    assert decoded["identical_outputs"]["domino"]["same"] == 2
