"""plots.py: a picture for what a run holds, none for what it does not. That of a report is in test_report.py."""

import json

import matplotlib.image
import pytest

from domino_jax.evals.plots import plot_run

TRAINED = [{"step": step, "base_loss": 5.0 / step, "final_loss": 4.0 / step, "seconds": step} for step in range(1, 9)]
EVALUATED = [{"step": 8, "eval_tau": 2.0, "eval_tau_per_prompt": 2.1, "eval_tau_backbone": 1.8, "eval_tau_1": 1.5}]


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([], []),
        (TRAINED, ["losses.png"]),
        (TRAINED + EVALUATED, ["losses.png", "tau.png", "tau_by_width.png"]),
    ],
)
def test_a_run_gets_the_pictures_that_it_has_data_for(tmp_path, rows, names):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_run(tmp_path) == names
    assert sorted(path.name for path in (tmp_path / "plots").glob("*")) == sorted(names)
    for name in names:
        height, width, _ = matplotlib.image.imread(tmp_path / "plots" / name).shape
        assert width >= 1000 and height >= 500
