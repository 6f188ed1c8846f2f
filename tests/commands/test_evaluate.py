"""evaluate.py over the golden models: τ without decoding equals τ of decoding, and mistakes are refused."""

import json
import shutil

import pytest

from tests.commands.test_decode_command import CASES, DRAFTER, TARGET, arguments, write_prompts
from tests.helpers.commands import run
from tests.helpers.train_runs import write_rows

pytestmark = pytest.mark.long

PROMPTS = [
    {"id": f"p{index}", "token_ids": case["prompt"], "task": "ab"[index % 2]} for index, case in enumerate(CASES)
]


@pytest.fixture(scope="module")
def decoded(tmp_path_factory):
    """(prompts file, output folder) of a decoding with drafts, sampled."""
    folder = tmp_path_factory.mktemp("decoded")
    prompts = write_prompts(folder, PROMPTS[:4])
    changes = {"config__decode__modes": "('domino',)", "config__decode__temperature": 0.8, "config__decode__seed": 3}
    assert run("decode", *arguments(prompts, folder / "out", **changes)) == 0
    return prompts, folder / "out"


def start(capsys, output, **changes):
    """Runs the command over the golden models: exit code, all printed text."""
    code = run("evaluate", *arguments(None, output, **changes))
    return code, "".join(capsys.readouterr())


def evaluation(output):
    return json.loads((output / "evaluation.json").read_text())


def test_the_pass_over_a_decoding_gives_its_tau_and_rates_exactly(decoded, tmp_path, capsys):
    code, err = start(capsys, tmp_path / "out", answers=decoded[1])
    assert code == 0, err
    report = json.loads((decoded[1] / "report.json").read_text())["modes"]["domino"]
    made = evaluation(tmp_path / "out")
    [figures] = made["drafters"].values()
    assert list(figures["tau"].values())[-1] == report["tau_pooled"]
    assert figures["accept_by_position"] == report["accept_rate_by_position"]
    assert figures["rounds"] == report["rounds"]
    assert set(figures["tasks"]) == {"a", "b"}
    assert made["answers"]["chosen"] == 1.0 and made["answers"]["temperatures"] == [0.8]
    assert (tmp_path / "out" / "evaluation.html").stat().st_size > 1_000


def test_the_target_answers_first_and_two_drafters_are_compared_with_their_times(
    decoded, tmp_path, capsys, monkeypatch
):
    other = shutil.copytree(DRAFTER, tmp_path / "other")
    seconds = {"0": 0.01, "1": 0.02, "8": 0.04}
    monkeypatch.setattr("domino_jax.evaluate.round_seconds", lambda *arguments: seconds)
    flags = {"drafters": f"{DRAFTER},{other}", "config__eval__prompts": decoded[0]}
    code, err = start(capsys, tmp_path / "out", round_seconds="measure", **flags)
    assert code == 0, err
    made = evaluation(tmp_path / "out")
    first, second = made["drafters"].values()
    assert first["tau"] == second["tau"]
    [pair] = made["pairs"]
    assert all(value == {"difference": 0.0, "interval": [0.0, 0.0]} for value in pair["tau"].values())
    assert first["speedup"] == {"1": first["tau"]["1"] / 2, "8": pytest.approx(first["tau"]["8"] / 4)}
    # The answers are stored, and a later call takes them.
    rows = (tmp_path / "out" / "answers.jsonl").read_bytes()
    code, err = start(capsys, tmp_path / "out", config__eval__prompts=decoded[0])
    assert code == 0 and (tmp_path / "out" / "answers.jsonl").read_bytes() == rows
    assert list(evaluation(tmp_path / "out")["drafters"]) == [str(DRAFTER)]


def test_answers_of_another_seed_are_refused_with_their_share_and_the_first_row(decoded, tmp_path, capsys):
    folder = shutil.copytree(decoded[1], tmp_path / "decoded")
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    for row in rows:
        row["sampling"]["seed"] += 1
    write_rows(folder / "answers.jsonl", rows)
    code, err = start(capsys, tmp_path / "out", answers=folder)
    assert code == 3
    assert "% of the answers' tokens" in err and "row p0" in err


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"drafters": f"{DRAFTER},{DRAFTER.parent / 'target' / '..' / DRAFTER.name}"}, 2, "names a folder twice"),
        ({"config__eval__prompts": ""}, 2, "there are no answers"),
        ({"answers": TARGET, "server": "localhost:1"}, 2, "give one of the two"),
        ({"server": "localhost:1", "requests": 0}, 2, "--requests is 0, expected 1 or more"),
        ({"server": "http://"}, 2, "does not answer"),
        ({"answers": TARGET}, 3, "holds no finished decoding"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(changes, code, says, tmp_path, capsys):
    left, err = start(capsys, tmp_path / "out", **changes)
    assert left == code and says in err
    assert "Traceback" not in err
