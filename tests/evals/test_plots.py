"""plots.py: a picture for what a run or a report holds, none for what it does not."""

import json

import matplotlib.image
import pytest

from domino_jax.evals import plots
from domino_jax.evals.plots import plot_run, write_plots

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


# ------------------------------------------------------------------------------------------ a decoding report

SPLIT = {"draft": 1.0, "head": 0.5, "verify": 4.0, "other": 1.2, "commit": 0.9, "round": 6.7}


def figures(speedup, tau=None, split=None):
    drafted = tau is not None
    return {
        "tokens_per_second": 100 * speedup,
        "speedup": speedup,
        "intervals": {"speedup": [0.9 * speedup, 1.1 * speedup] if drafted else None},
        "tau_pooled": tau,
        "rounds": 10 * drafted,
        "accept_histogram": {"1": 5, "2": 3, "3": 2} if drafted else {},
        "accept_rate_by_position": [0.5, 0.2] if drafted else [],
        "conditional_accept_rate_by_position": [0.5, None] if drafted else [],
        "time_split": split,
    }


def report_of(**changes):
    modes = {
        "autoregressive": figures(1.0),
        "backbone": figures(2.0, 3.0, {**SPLIT, "head": 0.0}),
        "domino": figures(2.5, 4.0, SPLIT),
    }
    made = {
        "modes": modes,
        "autoregressive_step_ms": 3.2,
        "simulated": None,
        "tasks": {},
        "average": {},
        "concurrency": {},
    }
    return {**made, **changes}


def drawn(folder, report):
    names = write_plots(folder, report)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    return names


ALWAYS = ["accept_lengths.png", "acceptance_by_position.png", "round_times.png"]


def test_a_report_gets_a_picture_for_all_that_it_holds(tmp_path):
    assert drawn(tmp_path / "plain", report_of()) == ALWAYS
    modes = report_of()["modes"]
    both = report_of(tasks={"gsm8k": modes, "mt-bench": modes}, average=modes)
    assert drawn(tmp_path / "tasks", both) == [*ALWAYS, "speedup_by_task.png"]
    levels = {"1": {"modes": modes}, "8": {"modes": modes}}
    assert drawn(tmp_path / "levels", report_of(concurrency=levels)) == [*ALWAYS, "throughput.png"]


def test_a_round_that_was_not_taken_apart_has_no_bar(tmp_path):
    whole = {**dict.fromkeys(SPLIT), "round": 6.7}
    modes = {"autoregressive": figures(1.0), "tree": figures(3.0, 5.0, whole)}
    assert drawn(tmp_path / "plots", report_of(modes=modes)) == ALWAYS[:2]


def test_pictures_of_a_simulated_run_say_so(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(plots.Figure, "suptitle", lambda figure, text, **look: titles.append(text))
    assert drawn(tmp_path / "plots", report_of(simulated=7.17)) == ALWAYS
    assert titles == ["SIMULATED acceptance, τ forced to 7.17"] * 3
