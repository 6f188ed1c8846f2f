"""plots.py: a picture for what a run or a report holds, none for what it does not."""

import json

import matplotlib.image
import pytest

from domino_jax.evals import plots
from domino_jax.evals.plots import plot_run, write_plots
from tests.helpers.report_runs import info_with, report_of, two_runs

LOSSES = {"base_accept_len": 1.5, "accept_len": 2.0}
TRAINED = [
    {"step": step, "base_loss": 5.0 / step, "final_loss": 4.0 / step, "seconds": step, **LOSSES}
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


def test_acceptance_is_drawn_over_hours_too(monkeypatch):
    """Hours of a core, where the run logged its processor time; between two logged steps they are interpolated."""
    pictures = {}
    monkeypatch.setattr(plots, "save", lambda folder, drawn: pictures.update(drawn))
    for rows, words in (
        (TRAINED, "hours"),
        ([{**row, "cpu_seconds": 72 * row["step"]} for row in TRAINED], "of a core"),
    ):
        monkeypatch.setattr(plots, "read_rows", lambda path, rows=rows: rows + EVALUATED)
        plot_run("workdir")
        [axes] = pictures["tau.png"].axes
        [above] = axes.child_axes
        pictures["tau.png"].canvas.draw()
        assert words in above.get_xlabel()
    assert above.get_xlim()[1] == pytest.approx(72 * 100 / 3600, rel=0.1)


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


def test_a_selector_has_its_own_loss_and_accept_length(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "curve", lambda axes, pairs, colour, label: drawn.append((label, pairs[0][1])))
    figures = {"base_loss": 3.0, "selector_loss": 2.0, "base_accept_len": 1.5, "serving_accept_len": 1.8}
    assert draw(tmp_path, [{"step": step, **figures, "seconds": 1} for step in (1, 2)]) == ["losses.png"]
    assert drawn == [("base", 3.0), ("base", 1.5), ("selector", 2.0), ("selector", 1.8)]


def test_a_drafter_without_a_head_has_one_loss(tmp_path):
    rows = [{**row, "final_loss": row["base_loss"]} for row in TRAINED]
    taus = [{**row, "eval_tau": row["eval_tau_backbone"]} for row in EVALUATED]
    assert draw(tmp_path, rows + taus) == ["losses.png", "tau.png"]


# ------------------------------------------------------------------------------------------ a decoding report

ALWAYS = ["accept_lengths.png", "round_times.png", "acceptance_by_position.png"]


def drawn(folder, report):
    names = write_plots(folder, report)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    return names


def test_a_report_gets_a_picture_for_all_that_it_holds(tmp_path):
    both = report_of(tasks={"gsm8k": two_runs(), "mt-bench": two_runs()})
    assert drawn(tmp_path / "tasks", both) == [*ALWAYS, "speedup_by_task.png"]
    report = report_of()
    levels = {size: {"modes": report["modes"]} for size in ("1", "8")}
    assert drawn(tmp_path / "levels", {**report, "concurrency": levels}) == [*ALWAYS, "throughput.png"]


def test_a_round_that_was_not_taken_apart_has_no_bar(tmp_path):
    whole = {"autoregressive": {"round": 0.005}, "domino": {"round": 0.0067}}
    assert drawn(tmp_path / "plots", report_of(split=whole)) == [ALWAYS[0], ALWAYS[2]]


def test_pictures_of_a_simulated_run_say_so(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(plots.Figure, "suptitle", lambda figure, text, **look: titles.append(text))
    assert drawn(tmp_path / "plots", report_of(info=info_with(simulate_tau=7.17))) == ALWAYS
    assert titles == ["SIMULATED acceptance, τ forced to 7.17"] * 3


def test_labels_are_spread_upwards_and_stay_within_the_axes():
    assert plots.spread([0.25, 0.25, 0.75], 0.125) == [0.25, 0.375, 0.75]
    assert plots.spread([0.5, 1.0, 1.0], 0.25) == [0.5, 0.75, 1.0]
    assert plots.spread([-float("inf"), 0.5], 0.25) == [0.0, 0.5]
    assert plots.spread([], 0.25) == []


def test_a_loss_of_zero_is_drawn(tmp_path):
    rows = [{"step": step, "base_loss": 2.0, "selector_loss": 0.0, "seconds": step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_run(tmp_path) == ["losses.png"]
