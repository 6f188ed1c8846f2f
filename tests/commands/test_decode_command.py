"""decode.py: one run over the golden models, whose files and figures the tests read, and mistakes that it refuses."""

import json
import shutil

import numpy as np
import pytest

from domino_jax.evals.run import Runner
from tests.helpers import train_runs
from tests.helpers.commands import run
from tests.helpers.models import rewrite_tensors
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import GOLDEN

TARGET, DRAFTER = GOLDEN / "target", GOLDEN / "drafter"
# Prompts of one bucket, so that few programs are compiled; nine, since two rows make groups of eight.
CASES = [*[train_runs.CASES[1], train_runs.CASES[3]] * 4, train_runs.CASES[1]]
NEW = 24


def write_prompts(folder, rows):
    return train_runs.write_rows(folder / "prompts.jsonl", rows)


def arguments(prompts_file, output, **changes):
    """The command line of a small run; changes replace or add flags, with __ for the dots."""
    values = {
        "config": ROOT / "configs" / "tiny.py",
        "config.target.path": TARGET,
        "config.drafter.path": DRAFTER,
        "config.decode.max_new_tokens": NEW,
        "config.decode.cache_length": 128,
        "config.decode.batch_size": 2,
        "prompts": prompts_file,
        "prompt": None,
        "output": output,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return [f"--{key}={value}" for key, value in values.items() if value is not None]


def start(capsys, argv):
    """Runs the command in this process; exit code, stdout, stderr."""
    return run("decode", *argv), *capsys.readouterr()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(argv, output folder) of a run of two modes over nine prompts, two rows at a time, throughput measured too."""
    folder = tmp_path_factory.mktemp("decode")
    prompts = write_prompts(folder, [{"id": f"p{i}", "token_ids": case["prompt"]} for i, case in enumerate(CASES)])
    changes = {"config__decode__modes": "('autoregressive','domino')", "config__decode__concurrency": "(2,)"}
    argv = arguments(prompts, folder / "out", **changes)
    assert run("decode", *argv) == 0
    return argv, folder / "out"


@pytest.fixture
def untimed(monkeypatch):
    """The parts of a round are timed in the run above; elsewhere that would only compile programs."""
    monkeypatch.setattr(Runner, "time_rounds", lambda *arguments: {})


@pytest.fixture
def no_group(monkeypatch):
    """All groups are done: none may run again, but for the throughput by batch size, which is left out."""
    monkeypatch.setattr("domino_jax.evals.run.measure_concurrency", lambda *arguments: {})
    monkeypatch.setattr(Runner, "decode_group", lambda *arguments: pytest.fail("a group ran again"))


def generations(output):
    return [json.loads(line) for line in (output / "generations.jsonl").read_text().splitlines()]


def test_every_prompt_has_a_row_in_every_mode_with_the_golden_tokens_and_rounds(finished):
    rows = generations(finished[1])
    assert len(rows) == 2 * len(CASES)
    for index, case in enumerate(CASES):
        own = {row["mode"]: row for row in rows if row["id"] == f"p{index}"}
        assert set(own) == {"autoregressive", "domino"}
        for row in own.values():
            assert row["token_ids"] == case["output"][:NEW]
            assert (row["text"], row["finish_reason"]) == (None, "length")
        assert own["autoregressive"]["accept_lengths"] == []
        found, golden = own["domino"]["accept_lengths"], case["accept_lengths"]
        assert 1 + sum(found) == NEW  # the last round is cut to the tokens that are kept
        assert found[:-1] == golden[: len(found) - 1] and found[-1] <= golden[len(found) - 1]


def test_the_report_measures_what_the_generations_hold(finished):
    report = json.loads((finished[1] / "report.json").read_text())
    lengths = [row["accept_lengths"] for row in generations(finished[1]) if row["mode"] == "domino"]
    domino = report["modes"]["domino"]
    assert domino["tau_pooled"] == sum(map(sum, lengths)) / sum(map(len, lengths))
    assert domino["tokens"] == NEW * len(CASES)
    assert domino["acceptance"]["mean_acceptance_length"] == pytest.approx(domino["tau_pooled"])
    assert domino["acceptance"]["num_draft_tokens"] == 8 * domino["rounds"]
    assert len(domino["accept_rate_by_position"]) == 8 and report["verify_width"] == 9
    assert report["identical_outputs"]["domino"]["same"] == report["identical_outputs"]["domino"]["of"] == 9
    times = {"draft", "head", "verify", "other", "round", "commit"}
    assert set(domino["time_split"]) == {"unit", *times, "step", "drafts"}
    assert domino["speedup_end_to_end"] > 0 and domino["break_even_tau"] > 0 and domino["drafts_per_round"] == 8
    low, high = domino["intervals"]["tau_pooled"]
    assert low < domino["tau_pooled"] < high
    assert domino["speedup"] > 0 and domino["compile_seconds"] > 0
    assert report["template_sha256"] is None and report["thinking"] is False
    assert report["stop_ids"] == [257]
    assert report["prompts"]["count"] == 9 and report["settings"]["max_new_tokens"] == NEW
    assert report["prompts"]["temperatures"] == [0.0]


@pytest.fixture
def copied(finished, tmp_path):
    """argv of the finished run on a copy of its folder."""
    argv, whole = finished
    return [*argv, f"--output={shutil.copytree(whole, tmp_path / 'copy')}"]


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_the_same_model_under_another_path_continues_and_another_model_under_the_same_path_is_refused(
    copied, untimed, no_group, tmp_path, capsys, part
):
    moved = shutil.copytree(GOLDEN / part, tmp_path / "moved")
    argv, report = [*copied, f"--config.{part}.path={moved}"], tmp_path / "copy" / "report.json"
    report.unlink()
    code, _, error = start(capsys, argv)
    assert code == 0 and report.is_file(), error
    changed = {"target": "model.layers.3.self_attn.q_proj.weight", "drafter": "prefix_gru.weight_hh_l0"}[part]
    rewrite_tensors(moved, {changed: np.negative})
    code, _, error = start(capsys, argv)
    assert code == 2 and "holds a decoding of something else" in error
    assert f"{part}.weights: " in error and len(error.splitlines()) <= 5


def test_other_settings_and_prompts_that_changed_in_their_file_are_refused(copied, finished, capsys):
    code, _, error = start(capsys, [*copied, "--config.decode.seed=7"])
    assert code == 2 and "settings.seed: 0 before, 7 now" in error and len(error.strip().splitlines()) <= 5
    file = finished[1].parent / "prompts.jsonl"
    whole = file.read_text()
    try:
        file.write_text(whole.replace('"p0"', '"q0"'))
        code, _, error = start(capsys, copied)
        assert code == 2 and "holds a decoding of something else" in error and "prompts.sha256: " in error
    finally:
        file.write_text(whole)


def test_throughput_is_measured_against_plain_decoding_at_the_same_batch_size(finished):
    level = json.loads((finished[1] / "report.json").read_text())["concurrency"]["2"]
    assert level["autoregressive"]["speedup"] == 1.0
    domino = level["domino"]
    assert domino["tokens"] == NEW * len(CASES) and domino["identical"]["same"] == 9
    assert 0 < domino["output_tokens_per_second"] < domino["tokens_per_second"]
    assert "Throughput by concurrency" in (finished[1] / "report.html").read_text()


def test_an_interrupted_run_goes_on_and_ends_as_the_uninterrupted_one(finished, untimed, tmp_path, capsys):
    """Cut in the second of two groups, with a torn row: ids, texts and counts come out the same."""
    argv, whole = finished
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    (output / "report.json").unlink()
    lines = (whole / "progress.jsonl").read_text().splitlines(keepends=True)
    (output / "progress.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    rows = (whole / "generations.jsonl").read_text().splitlines(keepends=True)
    (output / "generations.jsonl").write_text("".join(rows[:11]) + rows[11][:30])
    code, _, _ = start(capsys, [*argv, f"--output={output}"])
    assert code == 0
    assert (output / "generations.jsonl").read_text() == (whole / "generations.jsonl").read_text()
    reports = [json.loads((folder / "report.json").read_text()) for folder in (output, whole)]
    for mode in ("autoregressive", "domino"):
        ours, theirs = (report["modes"][mode] for report in reports)
        for key in ("answers", "tokens", "decode_tokens", "rounds", "tau_pooled", "accept_histogram", "stopped"):
            assert ours[key] == theirs[key]
    assert reports[0]["identical_outputs"] == reports[1]["identical_outputs"]


GOOD = [{"token_ids": [32, 33, 34]}]


@pytest.mark.parametrize(
    ("rows", "changes", "code", "message"),
    [
        (GOOD, {"config__drafter__path": ""}, 2, "need a drafter, and none is named"),
        (GOOD, {"config__drafter__path": "./nowhere"}, 2, "nowhere does not exist"),
        (GOOD, {"config__drafter__path": ROOT / "tests/golden/untied_noshift/drafter"}, 3, "but the target has"),
        (GOOD, {"config__drafter__head": "markov"}, 2, "drafter.head is 'markov', but the drafter in"),
        (GOOD, {"config__decode__modes": "('forest',)"}, 2, "config.decode.modes is"),
        ([{"id": "p", "messages": [{"role": "user", "content": "x"}]}], {}, 3, "holds no tokenizer"),
        ([{"id": "far", "token_ids": [1] * 120}], {}, 3, "prompt far needs 153 cache rows"),
        ([{"token_ids": [32], "temperature": value} for value in (-1, "hot")], {}, 3, "2 of 2 rows"),
        ([{"id": "odd", "token_ids": [99_999]}], {}, 3, "prompt odd holds token id 99999"),
        (None, {"prompts": "nowhere.jsonl"}, 2, "there is no such file"),
        (GOOD, {"config__decode__tasks": "('gsm8k',)"}, 2, "decode tasks or prompts, not both"),
        (GOOD, {"config__decode__concurrency": "(2,8)"}, 2, "decode.concurrency has 8, but there are 1 prompts"),
        (GOOD, {"output": "gs://bucket/out"}, 2, "--output=gs://bucket/out is in a bucket"),
    ],
)
def test_a_mistake_is_one_short_message_and_its_exit_code(tmp_path, capsys, rows, changes, code, message):
    prompts = write_prompts(tmp_path, rows) if rows else None
    found, _, error = start(capsys, arguments(prompts, **{"output": tmp_path / "out", **changes}))
    assert (found, "Traceback" in error) == (code, False)
    assert message in error and len(error.strip().splitlines()) <= 5
