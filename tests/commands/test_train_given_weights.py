"""train.py with the backbone or all of another drafter: what is taken, a restart, and drafters that do not fit."""

import shutil

import numpy as np
import pytest

from domino_jax.training.metrics import read_rows
from domino_jax.weights.safetensors_file import read_header
from tests.helpers.train_runs import arguments, start, training_files

CHOICES = {
    "config__data__max_length": 112,
    "config__train__steps": 4,
    "config__train__ema_decay": 0.5,
    "config__checkpoint__every": 2,
    "config__preflight__rows": 0,
}


def run(workdir, **changes):
    """The exit code of a run in this process, in `workdir`; rows are the golden target's own answers."""
    return start(arguments(training_files(workdir.parent), workdir, **CHOICES, **changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(workdir of a plain shifted drafter, workdir of a Domino drafter on its backbone)."""
    folder = tmp_path_factory.mktemp("frozen")
    plain, domino = folder / "plain", folder / "domino"
    assert run(plain, config__drafter__head="none", config__drafter__shift_label=True) == 0
    assert run(domino, config__train__frozen_backbone=plain, config__train__lambda_start=0.0) == 0
    return plain, domino


def exported(workdir):
    stored = read_header(workdir / "export" / "model.safetensors")
    return {name: np.asarray(tensor.read()) for name, tensor in stored.items()}


def test_the_backbone_is_the_other_drafters_to_the_bit_and_the_head_learns(folders):
    plain, domino = map(exported, folders)
    assert set(domino) - set(plain) and set(plain) <= set(domino)
    for name, tensor in plain.items():
        assert tensor.tobytes() == domino[name].tobytes(), name
    losses = [row["final_loss"] for row in read_rows(folders[1] / "metrics.jsonl")]
    assert len(set(losses)) == 4


def test_a_restart_continues_exactly(folders, tmp_path):
    plain, domino = folders
    again = tmp_path / "again"
    shutil.copytree(domino, again)
    for name in ("checkpoints/4", "export"):
        shutil.rmtree(again / name)
    (again / "finished.json").unlink()
    changes = {"config__train__lambda_start": 0.0, "config__data__train": domino.parent / "rows.jsonl"}
    assert run(again, config__train__frozen_backbone=plain, **changes) == 0
    for name, tensor in exported(domino).items():
        assert exported(again)[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config__drafter__block_size": 5}, "has block_size 4, and the recipe's drafter has 5"),
        ({"config__drafter__target_layer_ids": "(1,2)"}, "has target_layer_ids (1, 3), and the recipe's drafter has"),
        ({"config__drafter__shift_label": False}, "has shift_label True, and the recipe's drafter has False"),
    ],
)
def test_a_backbone_of_another_shape_is_refused(folders, tmp_path, capsys, changes, message):
    workdir = tmp_path / "refused"
    assert run(workdir, config__train__frozen_backbone=folders[0], config__train__lambda_start=0.0, **changes) == 3
    said = capsys.readouterr().err
    assert message in said and str(folders[0]) in said and len(said.strip().splitlines()) <= 5
    assert not (workdir / "checkpoints").exists() or not list((workdir / "checkpoints").glob("[0-9]*"))


def test_a_run_starts_from_all_weights_of_another_drafter(folders, tmp_path):
    """With a rate of nothing it exports what it was given, of its own values and of their averages."""
    _, domino = folders
    again = tmp_path / "again"
    assert run(again, config__train__start_from=domino, config__train__learning_rate=1e-30) == 0
    given = exported(domino)
    assert exported(again).keys() == given.keys()
    for name, tensor in exported(again).items():
        assert tensor.tobytes() == given[name].tobytes(), name


def test_a_drafter_of_another_head_or_shape_is_no_start(folders, tmp_path, capsys):
    plain, domino = folders
    assert run(tmp_path / "head", config__train__start_from=plain) == 3
    assert f"the drafter of {plain} has head none, and the recipe's drafter has domino" in capsys.readouterr().err
    assert run(tmp_path / "rank", config__train__start_from=domino, config__drafter__domino__emb_dim=5) == 3
    assert "and the recipe's drafter has 5" in capsys.readouterr().err
