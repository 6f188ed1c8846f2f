"""When a run counts as finished: its marker alone says so, and a run without its checkpoints is not taken for one.

The evaluations are stand-ins: τ is 3 after step 4 and 2 after every other step.
"""

import json
import shutil

import jax
import pytest
from etils import epath

from domino_jax import export, train
from domino_jax.method.drafters import parse_config
from domino_jax.recipe import builders
from domino_jax.runtime.errors import DataError
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.weights.identity import target_identity
from tests.helpers.train_runs import GOLDEN, arguments, interrupted, losses, start, weights


@pytest.fixture
def files(finished_run):
    return finished_run.files


@pytest.fixture(scope="module", autouse=True)
def one_program_and_played_evaluations():
    """All runs have the same recipe, so that their step is traced and compiled once."""
    save, saved = Checkpoints.save, []

    def note(self, step, *arguments):
        saved.append(step)
        save(self, step, *arguments)

    def measure(params, between):
        return {"eval_tau": 3.0 if saved[-1] == 4 else 2.0}

    measure.prompts = []

    def once(make):
        made = []
        return lambda *arguments: (made or made.append(make(*arguments)) or made)[0]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("state_maker", "train_step_of"):
            patch.setattr(builders, name, once(getattr(builders, name)))
        patch.setattr(Checkpoints, "save", note)  # an evaluation begins after the checkpoint of its step
        measure.measured_with = "these answers"
        patch.setattr(builders, "evaluation_of", lambda *_: measure)
        yield


def command(files, workdir, **changes):
    return arguments(files, workdir, config__eval__every=4, **changes)


@pytest.fixture(scope="module")
def whole(finished_run, tmp_path_factory):
    """The finished run, as if its evaluation after step 4 had had a τ of 3 and that after step 8 one of 2."""
    workdir = interrupted(finished_run.workdir, tmp_path_factory.mktemp("whole") / "run", 8)
    taus = {step: {"tau": tau, "measured_with": "these answers"} for step, tau in ((4, 3.0), (8, 2.0))}
    (workdir / "checkpoints" / "tau.json").write_text(json.dumps(taus))
    assert start(command(finished_run.files, workdir)) == 0
    return workdir


def copy(workdir, tmp_path):
    return shutil.copytree(workdir, tmp_path / "run")


def test_the_marker_names_the_step_and_the_export(whole):
    marker = json.loads((whole / "finished.json").read_text())
    target = target_identity(GOLDEN / "target")
    assert marker == {"step": 8, "exported_step": 4, "target": target}


@pytest.mark.parametrize("lost", [("checkpoints",), ("checkpoints", "export"), ("checkpoints/4/manifest.json",)])
def test_a_run_that_lost_its_checkpoints_is_not_begun_again(whole, tmp_path, lost):
    workdir = copy(whole, tmp_path)
    shutil.rmtree(workdir / "checkpoints" / "8")
    for name in lost:
        shutil.rmtree(workdir / name) if (workdir / name).is_dir() else (workdir / name).unlink()
    with Checkpoints(workdir, keep=3) as checkpoints, pytest.raises(DataError):
        checkpoints.restore_latest({})


def test_a_finished_run_is_shown_until_all_its_checkpoints_are_gone(files, whole, tmp_path, capsys):
    workdir = copy(whole, tmp_path)
    (workdir / "export" / "README.md").write_text("A card of my own.")
    before = (workdir / "metrics.jsonl").read_bytes()
    shutil.rmtree(workdir / "checkpoints" / "8")
    assert start(command(files, workdir)) == 0
    assert "holds a finished run" in capsys.readouterr().out
    shutil.rmtree(workdir / "checkpoints")
    for _ in range(2):  # with its export and without
        assert start(command(files, workdir)) == 3
        output = capsys.readouterr()
        assert "holds no intact checkpoint" in output.err and len(output.err.splitlines()) <= 5
        assert "finished run" not in output.out
        shutil.rmtree(workdir / "export", ignore_errors=True)
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_the_export_at_the_end_is_the_best_by_tau_and_the_final_decoding_is_of_it(
    files, whole, tmp_path, monkeypatch, capsys
):
    decoded = []
    monkeypatch.setattr(train, "decode_trained", lambda *arguments: decoded.append(weights(arguments[-1])))
    monkeypatch.setattr(train, "console_table", lambda report: None)
    workdir = copy(whole, tmp_path)
    assert "τ 3.00 at step 4" in (workdir / "export" / "README.md").read_text()
    drafter = parse_config(json.loads((workdir / "drafter_config.json").read_text()))
    folders = [epath.Path(workdir / "checkpoints" / step) for step in "48"]
    best, last = (jax.tree.leaves(export.restore_params(folder, drafter))[0] for folder in folders)
    assert (best != last).any()

    # Killed in its export, it comes to the same.
    shutil.rmtree(workdir / "export")
    (workdir / "finished.json").unlink()
    assert start(command(files, workdir, config__eval__final=True)) == 0
    assert "exported the drafter of step 4" in capsys.readouterr().out
    assert decoded == [weights(workdir)] == [weights(whole)]

    # Without that checkpoint's weights the last step is all there is.
    largest = max((workdir / "checkpoints" / "4" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    (workdir / "finished.json").unlink()
    assert start(command(files, workdir)) == 0
    assert "step 4 is damaged and skipped" in capsys.readouterr().out and weights(workdir) != weights(whole)


def test_a_run_killed_before_its_first_checkpoint_reports_it_and_starts_again(files, whole, tmp_path, capsys):
    workdir = interrupted(whole, tmp_path / "run", 0)
    (workdir / "first_checkpoint.json").unlink()
    rows = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_text("".join(rows[:2]))
    assert start(command(files, workdir)) == 0
    assert "starts from step 0: step 2 was reached" in capsys.readouterr().out
    assert losses(workdir) == losses(whole)
