"""plots.plot_run: a picture for what a run holds, none for what it does not."""

import json

import matplotlib.image
import pytest

from domino_jax.plots import plot_run

TRAINED = [
    {
        "step": step,
        "base_loss": 5.0 / step,
        "final_loss": 4.0 / step,
        "base_accept_len": 1.5,
        "accept_len": 2.0,
        "seconds": step,
    }
    for step in range(1, 101)
]
EVALUATED = [
    {"step": step, "eval_tau": 2.0, "eval_tau_per_prompt": 2.1, "eval_tau_backbone": 1.8, "seconds": step}
    for step in (50, 100)
]
POSITIONS = [{**row, "eval_accept_by_position": [0.8, 0.5, 0.2]} for row in EVALUATED]


def draw(workdir, rows):
    workdir.mkdir(exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return plot_run(workdir)


def test_a_whole_run_gets_three_pictures(tmp_path):
    names = draw(tmp_path, TRAINED + POSITIONS)
    assert names == ["losses.png", "tau.png", "accept_by_position.png"]
    for name in names:
        height, width, _ = matplotlib.image.imread(tmp_path / "plots" / name).shape
        assert width >= 1000 and height >= 500
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(names)


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([], []),
        (TRAINED[:1], []),
        (TRAINED, ["losses.png"]),
        (EVALUATED, ["tau.png"]),
        (TRAINED + EVALUATED[:1], ["losses.png", "tau.png"]),
    ],
)
def test_a_picture_without_data_is_not_drawn(tmp_path, rows, names):
    assert draw(tmp_path, rows) == names
    assert (tmp_path / "plots").exists() == bool(names)


def test_values_that_were_not_finite_leave_a_gap(tmp_path):
    rows = [dict(row) for row in TRAINED[:4]]
    rows[1]["base_loss"] = rows[2]["final_loss"] = None
    assert draw(tmp_path, rows) == ["losses.png"]


def test_a_drafter_without_a_head_has_one_loss(tmp_path):
    rows = [{**row, "final_loss": row["base_loss"]} for row in TRAINED]
    taus = [{**row, "eval_tau": row["eval_tau_backbone"]} for row in EVALUATED]
    assert draw(tmp_path, rows + taus) == ["losses.png", "tau.png"]
