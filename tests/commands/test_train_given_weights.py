"""train.py with the backbone or all of another drafter: the first weights, a restart, and drafters that do not fit."""

import numpy as np
import pytest

from domino_jax.training.metrics import read_rows
from domino_jax.weights.safetensors_file import read_header
from tests.helpers.train_runs import arguments, shared_folder, start, train_once

pytestmark = pytest.mark.long

CHOICES = {
    "config__train__steps": 4,
    "config__train__ema_decay": 0.5,
    "config__checkpoint__every": 2,
}
HEAD = ("prefix_gru.", "embed_proj.")


def run(finished_run, workdir, **changes) -> int:
    return start(arguments(finished_run.files, workdir, **CHOICES, **changes))


def frozen(finished_run) -> dict:
    return {"config__train__frozen_backbone": finished_run.workdir, "config__train__lambda_start": 0.0}


@pytest.fixture(scope="session")
def on_its_backbone(finished_run, tmp_path_factory):
    """The workdir of a new Domino head on the frozen backbone of finished_run."""
    changes = {**CHOICES, **frozen(finished_run)}
    workdir = shared_folder(tmp_path_factory) / "on_its_backbone"
    return train_once(workdir, lambda fresh: arguments(finished_run.files, fresh, **changes))


def exported(workdir) -> dict[str, bytes]:
    stored = read_header(workdir / "export" / "model.safetensors")
    return {name: np.asarray(tensor.read()).tobytes() for name, tensor in stored.items()}


def test_the_backbone_is_the_other_drafters_to_the_bit_and_the_head_learns(finished_run, on_its_backbone):
    before, after = exported(finished_run.workdir), exported(on_its_backbone)
    assert {name for name in after if after[name] == before[name]} == {n for n in before if not n.startswith(HEAD)}
    assert len({row["final_loss"] for row in read_rows(on_its_backbone / "metrics.jsonl")}) == 4


def test_a_backbone_of_another_shape_is_refused(finished_run, tmp_path, capsys):
    workdir = tmp_path / "refused"
    assert run(finished_run, workdir, **frozen(finished_run), config__drafter__block_size=5) == 3
    printed = capsys.readouterr().err
    assert (
        "has block_size 4, and the recipe's drafter has 5" in printed
        and str(finished_run.workdir) in printed
        and len(printed.strip().splitlines()) <= 5
    )
    assert not (workdir / "checkpoints").exists() or not list((workdir / "checkpoints").glob("[0-9]*"))


def test_a_run_starts_from_all_weights_of_another_drafter(finished_run, tmp_path):
    """With a rate of nothing it exports their average, which is what it began with."""
    changes = {"config__train__start_from": finished_run.workdir, "config__train__learning_rate": 1e-30}
    assert run(finished_run, tmp_path / "again", **changes) == 0
    assert exported(tmp_path / "again") == exported(finished_run.workdir)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config__drafter__head": "none", "config__drafter__shift_label": True}, "has head domino, and the recipe's"),
        ({"config__drafter__domino__emb_dim": 5}, "and the recipe's drafter has 5"),
    ],
)
def test_a_drafter_of_another_head_or_shape_is_no_start(finished_run, tmp_path, capsys, changes, message):
    changes = {"config__train__start_from": finished_run.workdir, **changes}
    assert run(finished_run, tmp_path / "other", **changes) == 3
    assert message in capsys.readouterr().err
