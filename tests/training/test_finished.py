"""When a run counts as finished: its marker alone says so, and a run without its checkpoints is not taken for one."""

import json
import shutil

import jax
import numpy as np
import pytest

from domino_jax import export, train
from domino_jax.drafters.config import DrafterConfig
from domino_jax.recipe import builders
from domino_jax.training import step_folders
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.training.metrics import read_rows
from tests.commands.test_train_command import CASES, arguments, losses, start, training_rows, write_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(training rows, held-out prompts) as files."""
    folder = tmp_path_factory.mktemp("rows")
    prompts = [{"id": f"p{index}", "token_ids": case["prompt"]} for index, case in enumerate(CASES[:2])]
    return write_rows(folder / "rows.jsonl", training_rows()), write_rows(folder / "prompts.jsonl", prompts)


def command(files, workdir, **changes):
    return arguments(files, workdir, config__eval__every=4, **changes)


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """A finished run of 8 steps with evaluations after 4 and 8; tests copy it."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    assert start(command(files, workdir)) == 0
    return workdir


@pytest.fixture(scope="module")
def cut(files, tmp_path_factory):
    """A run that died at step 6, after the best export and the checkpoint of step 4; tests copy it."""
    workdir = tmp_path_factory.mktemp("cut") / "run"
    with dying(train.MetricsWriter, "write", lambda self, step, values: step == 6):
        assert start(command(files, workdir)) == 130
    assert (workdir / "export" / "config.json").exists()
    return workdir


class dying(pytest.MonkeyPatch):
    """Within it a method raises KeyboardInterrupt instead of a call that `when` accepts."""

    def __init__(self, owner, name, when, late=False):
        super().__init__()
        method = getattr(owner, name)

        def dies(*args, **named):
            if when(*args, **named):
                if late:
                    method(*args, **named)
                raise KeyboardInterrupt
            return method(*args, **named)

        self.setattr(owner, name, dies)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.undo()


def copy(workdir, tmp_path):
    return shutil.copytree(workdir, tmp_path / "run")


def evaluations(workdir):
    return [row["step"] for row in read_rows(workdir / "metrics.jsonl") if "eval_tau" in row]


def weights(workdir):
    return (workdir / "export" / "model.safetensors").read_bytes()


def test_the_marker_names_the_step_and_the_export(whole):
    marker = json.loads((whole / "finished.json").read_text())
    assert (marker["step"], marker["processes"], len(marker["export_sha256"])) == (8, 1, 64)
    assert marker["exported_step"] in (4, 8)


@pytest.mark.parametrize("late", [False, True], ids=["before it is written", "after it is written"])
def test_killed_around_the_first_best_export_a_run_continues(files, whole, tmp_path, capsys, late):
    workdir = tmp_path / "run"
    with dying(export, "write_export", lambda *_, **named: True, late):
        assert start(command(files, workdir)) == 130
    assert (workdir / "export").exists() == late
    assert (workdir / "checkpoints" / "4" / "manifest.json").exists()
    assert start(command(files, workdir)) == 0
    message = capsys.readouterr().out
    assert "continues from step 4" in message and "holds a finished run" not in message
    assert losses(workdir) == losses(whole) and weights(workdir) == weights(whole)
    assert evaluations(workdir) == [4, 8]


def delete_manifests(workdir):
    for path in (workdir / "checkpoints").glob("*/manifest.json"):
        path.unlink()


def delete_checkpoints(workdir):
    shutil.rmtree(workdir / "checkpoints")


def delete_checkpoints_and_export(workdir):
    delete_checkpoints(workdir)
    shutil.rmtree(workdir / "export")


@pytest.mark.parametrize("harm", [delete_manifests, delete_checkpoints, delete_checkpoints_and_export])
def test_a_run_that_lost_its_checkpoints_stops_with_3(files, cut, tmp_path, capsys, harm):
    workdir = copy(cut, tmp_path)
    harm(workdir)
    before = (workdir / "metrics.jsonl").read_bytes()
    assert start(command(files, workdir)) == 3
    message = capsys.readouterr()
    assert "finished" not in message.out and 0 < len(message.err.splitlines()) <= 5
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_a_run_without_its_marker_takes_no_step_and_writes_it_again(files, whole, tmp_path, capsys):
    workdir = copy(whole, tmp_path)
    (workdir / "finished.json").unlink()
    assert start(command(files, workdir)) == 0
    assert "continues from step 8" in capsys.readouterr().out
    for name in ("finished.json", "metrics.jsonl", "export/model.safetensors"):
        assert (workdir / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_export_at_the_end_is_the_best_by_tau_and_the_final_decoding_is_of_it(files, tmp_path, monkeypatch, capsys):
    """Decoded τ is 3 after step 4 and 2 after step 8: what was better stays, in the export, its card and the report."""
    taus, decoded = iter([3.0, 2.0]), []
    monkeypatch.setattr(builders, "evaluation_of", lambda *_: lambda params, between: {"eval_tau": next(taus)})
    decode_trained = train.decode_trained

    def spy(config, loaded, drafter, params, output):
        decoded.append(np.asarray(jax.tree.leaves(params)[0]))
        return decode_trained(config, loaded, drafter, params, output)

    monkeypatch.setattr(train, "decode_trained", spy)
    workdir = tmp_path / "run"
    with dying(train, "mark_finished", lambda *_: True):
        assert start(command(files, workdir, config__eval__final=True)) == 130
    best = weights(workdir)
    assert "exported the drafter of step 4" in capsys.readouterr().out
    assert "Decoded τ 3.00 at step 4" in (workdir / "export" / "README.md").read_text()
    with Checkpoints(workdir, keep=3) as checkpoints:
        drafter = DrafterConfig.from_dict(json.loads((workdir / "drafter_config.json").read_text()))
        saved = {step: export.restore_params(checkpoints, drafter, step) for step in (4, 8)}
    first = {step: jax.tree.leaves(params)[0] for step, params in saved.items()}
    np.testing.assert_array_equal(decoded[0], first[4])
    assert (first[4] != first[8]).any()

    # Started again after its last step, also from a lost export, it comes to the same.
    shutil.rmtree(workdir / "export")
    assert start(command(files, workdir, config__eval__final=True)) == 0
    assert weights(workdir) == best
    assert json.loads((workdir / "finished.json").read_text())["exported_step"] == 4
    scores = json.loads((workdir / "checkpoints" / "tau.json").read_text())
    assert scores == {"4": 3.0, "8": 2.0}  # every evaluated step

    # Without that checkpoint's weights the last step is all there is.
    largest = max((workdir / "checkpoints" / "4" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    (workdir / "finished.json").unlink()
    assert start(command(files, workdir)) == 0
    assert "the last step is exported instead" in capsys.readouterr().out and weights(workdir) != best


@pytest.mark.parametrize("name", ["config.json", "preflight.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 200_000], ids=["nothing", "a list", "brackets"])
def test_a_broken_file_of_a_run_is_one_message(files, whole, tmp_path, capsys, name, content):
    workdir = copy(whole, tmp_path)
    (workdir / name).write_bytes(content)
    if name == "preflight.json":
        (workdir / "finished.json").unlink()  # a finished run does not read it
    assert start(command(files, workdir)) == 3
    message = capsys.readouterr().err
    assert name in message and "Traceback" not in message and len(message.splitlines()) <= 5


@pytest.mark.parametrize("harm", ["damaged", "deleted"])
def test_an_export_that_changed_after_the_end_is_written_again(files, whole, tmp_path, capsys, harm):
    workdir = copy(whole, tmp_path)
    if harm == "damaged":
        (workdir / "export" / "model.safetensors").write_bytes(weights(whole)[:-1] + b"x")
    else:
        shutil.rmtree(workdir / "export")
    assert start(command(files, workdir)) == 0
    message = capsys.readouterr().out
    assert "export changed since the run ended" in message and "holds a finished run" not in message
    assert weights(workdir) == weights(whole)
    assert start(command(files, workdir)) == 0
    assert "holds a finished run" in capsys.readouterr().out


def test_without_checkpoints_a_finished_run_is_shown_and_a_damaged_export_is_refused(files, whole, tmp_path, capsys):
    workdir = copy(whole, tmp_path)
    delete_checkpoints(workdir)
    (workdir / "export" / "README.md").write_text("A card of my own.")
    assert start(command(files, workdir)) == 0
    assert "holds a finished run" in capsys.readouterr().out
    (workdir / "export" / "model.safetensors").write_bytes(b"")
    assert start(command(files, workdir)) == 3
    assert "first_checkpoint.json" in capsys.readouterr().err


def test_a_run_killed_before_its_first_checkpoint_reports_it_and_starts_again(files, whole, tmp_path, capsys):
    workdir = tmp_path / "run"
    with dying(train.MetricsWriter, "write", lambda self, step, values: step == 3):
        assert start(command(files, workdir)) == 130
    assert start(command(files, workdir)) == 0
    assert "starts from step 0: step 2 was reached" in capsys.readouterr().out
    assert losses(workdir) == losses(whole)


def test_a_checkpoint_counts_also_where_the_note_about_the_first_one_finds_no_room(tmp_path, monkeypatch):
    def full(path, content):
        if path.name == "first_checkpoint.json":
            raise OSError(28, "No space left on device")
        write(path, content)

    write = step_folders.write_whole
    monkeypatch.setattr(step_folders, "write_whole", full)
    message = []
    with Checkpoints(tmp_path, keep=2, report=message.append) as checkpoints:
        checkpoints.save(4, {"w": np.zeros(2)}, {}, {})
        checkpoints.wait()
        assert checkpoints.steps() == [4]
    assert len(message) == 1 and "first_checkpoint.json could not be written" in message[0]
