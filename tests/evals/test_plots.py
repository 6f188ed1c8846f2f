"""plots.py: a picture for what a run or a report holds, none for what it does not."""

import json

import matplotlib.image
import pytest

from domino_jax.evals.plots import plot_run, write_plots
from tests.helpers.report_runs import report_of

LOSSES = {"base_accept_len": 1.5, "accept_len": 2.0}
TRAINED = [
    {"step": step, "base_loss": 5.0 / step, "final_loss": 4.0 / step, "seconds": step, **LOSSES}
    for step in range(1, 101)
]
EVALUATED = [
    {"step": step, "eval_tau": 2.0, "eval_tau_per_prompt": 2.1, "eval_tau_backbone": 1.8, "eval_tau_1": 1.5}
    for step in (50, 100)
]


def draw(workdir, rows):
    workdir.mkdir(exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return plot_run(workdir)


def test_a_whole_run_gets_three_pictures(tmp_path):
    names = draw(tmp_path, TRAINED + EVALUATED)
    assert names == ["losses.png", "tau.png", "tau_by_width.png"]
    for name in names:
        height, width, _ = matplotlib.image.imread(tmp_path / "plots" / name).shape
        assert width >= 1000 and height >= 500
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(names)


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([], []),
        (TRAINED, ["losses.png"]),
        (EVALUATED, ["tau.png", "tau_by_width.png"]),
        (TRAINED + EVALUATED[:1], ["losses.png", "tau.png", "tau_by_width.png"]),
    ],
)
def test_a_picture_without_data_is_not_drawn(tmp_path, rows, names):
    assert draw(tmp_path, rows) == names
    assert (tmp_path / "plots").exists() == bool(names)


def test_a_report_gets_a_picture(tmp_path):
    names = write_plots(tmp_path, report_of())
    assert names == ["accept_lengths.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
