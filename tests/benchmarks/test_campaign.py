"""The campaign for accelerators, with tiny shapes on the CPU: what it writes, resumes, leaves out and survives."""

import json
import os
import sys

import pytest

from benchmarks.device import campaign as device_campaign
from benchmarks.device import phases, smollm2
from domino_jax.runtime.errors import DominoError
from tests.helpers.models import GOLDEN_SETS
from tests.helpers.paths import ASSETS, ROOT

MEASURED = ["parity", "bandwidth", "train-public", "train-paper", "decode-small", "context-small", "batch-small"]
MEASURED += ["drafts-small", "attention-small"]


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


def test_parity_compares_golden_files_in_both_dtypes(folder):
    checks = record_of(folder, "parity")["checks"]
    assert len(checks) == 2 and set(phases.LARGE.golden_sets) == set(GOLDEN_SETS)
    exact = {"plain texts", "Domino texts", "accept lengths", "first drafts"}
    assert exact <= set(checks["tied_shift float32"])
    assert {"logits", "texts beyond near ties"} == set(checks["tied_shift bfloat16"])
    for check in checks.values():
        assert all(0 <= one["error"] <= one["limit"] for one in check.values())


def test_decoding_times_every_part_beside_its_limit(folder):
    record = record_of(folder, "decode-small")
    names = {"step", "draft", "head", "commit", "round", "round_without_head", "round_tree(4)"}
    names |= {"verify(4)", "verify(17)", "propose_tree(4)"}
    assert set(record["parts"]) == names
    assert set(record["speedup_at_tau"]) == {"5.42", "7.17"} and record["slots"] == 64
    must = {name: part["must_bytes"] for name, part in record["parts"].items()}
    assert must["step"] < must["verify(4)"] < must["verify(17)"] < must["round"]
    assert must["round_tree(4)"] < must["round"] and must["commit"] and must["propose_tree(4)"] is None


def test_contexts_and_batches_have_a_step_and_a_round_each(folder):
    assert list(record_of(folder, "context-small")["sizes"]) == ["32 slots", "64 slots"]
    sizes = record_of(folder, "batch-small")["sizes"]
    assert [sizes[name]["rows"] for name in sizes] == [1, 2]
    for size in sizes.values():
        assert {"step", "round", "break_even_tau", "speedup_at_tau", "plain_tokens_per_second"} <= set(size)


def test_training_is_timed_at_both_points(folder):
    public, paper = (record_of(folder, f"train-{point}") for point in ("public", "paper"))
    assert set(public["parts"]) == {"whole", "without_target"} and set(paper["parts"]) == {"whole"}
    assert paper["choices"]["head"] and not public["choices"]["head"]
    assert public["parts"]["whole"]["tokens_per_second"] > 0 and "mfu" in public["parts"]["whole"]


def test_the_table_has_rows_of_every_phase(folder):
    text = (folder / "summary.md").read_text()
    assert all(f"| {name} |" in text for name in MEASURED) and "None" not in text
    assert (folder / "data" / "device_campaign.csv").exists()


# -------------------------------------------------------------------------------------------- resuming, time, failures


def test_a_finished_campaign_measures_nothing_again(folder):
    assert device_campaign.campaign(choices_of(folder), unwanted) == 0


def test_no_phase_is_begun_that_would_not_fit_the_time_left(tmp_path, stubs, capsys):
    assert device_campaign.campaign(choices_of(tmp_path, "--minutes=2.5"), unwanted) == 0
    assert capsys.readouterr().out.count("left out, it takes about 3 of 2.5 minutes left") == 2
    assert device_campaign.campaign(choices_of(tmp_path, "--minutes=3.5"), in_process) == 0
    assert sorted(device_campaign.read_records(tmp_path)) == ["first", "second"]


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


def test_phases_are_named_by_their_names_or_beginnings(tmp_path, capsys):
    chosen = device_campaign.selected(choices_of(tmp_path, "--phases=train,bandwidth"))
    assert list(chosen) == ["bandwidth", "train-public", "train-paper"]
    assert device_campaign.main([f"--output={tmp_path}", "--phases=decode-9b"]) == 2
    error = capsys.readouterr().err
    assert "--phases names decode-9b, but the phases are parity, bandwidth, train-public," in error
    assert "--smollm2=FOLDER" in error and not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["--small", "--docs"], ["--smollm2=nowhere"]])
def test_flags_that_disagree_are_refused(tmp_path, flags):
    with pytest.raises(SystemExit) as error:
        device_campaign.parsed([f"--output={tmp_path}", *flags])
    assert error.value.code == 2


# -------------------------------------------------------------------------------------------------- separate processes


def test_a_phase_runs_in_a_separate_process(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert device_campaign.main([f"--output={tmp_path}", "--small", "--phases=bandwidth"]) == 0
    record = record_of(tmp_path, "bandwidth")
    assert record["copy_bytes_per_second"] is None or record["copy_bytes_per_second"] > 0
    assert (tmp_path / "bandwidth.log").exists() and (tmp_path / "summary.md").exists()


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


def test_a_mistake_that_a_phase_reports_ends_the_campaign(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho error: another device\nexit 2\n")
    os.chmod(python, 0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DominoError, match="^another device$"):
        device_campaign.run_apart(choices_of(tmp_path), "bandwidth", 60.0)


# ------------------------------------------------------------------------------------------------------------- SmolLM2


def test_a_step_of_the_pipeline_names_the_one_that_is_missing(tmp_path):
    pipeline = smollm2.Pipeline(ASSETS / "tiny_qwen3", tmp_path)
    with pytest.raises(DominoError, match="run the phase smollm2-answers first"):
        smollm2.training(pipeline)
    with pytest.raises(DominoError, match="run the phase smollm2-training first"):
        smollm2.decoding(pipeline)


@pytest.mark.parametrize(("violations", "failed"), [(0, False), (2, True)])
def test_the_decoding_fails_if_texts_differ_beyond_near_ties(tmp_path, monkeypatch, violations, failed):
    counts = {"same": 38, "of": 40, "near_ties": 2 - violations, "violations": violations}
    report = {"modes": {"domino": {"speedup": 1.5}}, "identical_outputs": {"domino": counts}}
    for name in ("run/export", "decoded"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "decoded" / "report.json").write_text(json.dumps(report))
    monkeypatch.setattr(smollm2.Pipeline, "run", lambda *_: 1.0)
    decoded = smollm2.decoding(smollm2.Pipeline(ASSETS / "tiny_qwen3", tmp_path))
    assert decoded["modes"] == report["modes"] and decoded["identical_outputs"]["domino"] == counts
    assert ("failed" in decoded) == failed


@pytest.mark.slow(minutes=4)
def test_the_pipeline_answers_trains_and_decodes(tmp_path):
    """With the tiny recipe and the shipped target, whose folder has the same files."""
    flags = ["regenerate.num_prompts=8", "regenerate.max_new_tokens=24", "train.steps=3", "train.log_every=1"]
    flags += ["preflight.rows=0", "eval.every=0", "eval.final=False", "checkpoint.every=3"]
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
