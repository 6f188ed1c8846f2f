"""compare: runs on one picture each, with what differs between their recipes."""

import json

import matplotlib.image

from tests.helpers.commands import run


def workdir(folder, gamma, rows):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"train": {"gamma": gamma, "steps": 30}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_are_drawn_together_and_their_differences_are_said(tmp_path, capsys):
    steps = [
        {"step": step, "loss": 9.0, "final_loss": 4.0 / step, "accept_len": 1.5, "seconds": 6.0 * step}
        for step in (1, 30)
    ]
    first = workdir(tmp_path / "a" / "run", 4.0, [*steps, {"step": 30, "eval_tau": 2.5}])
    second = workdir(tmp_path / "b" / "run", 7.0, steps[:1])
    assert run("compare", f"--runs={first},{second}", f"--output={tmp_path}/out") == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "-run │" in line]
    assert cells == [["a-run", "30", "0.1333", "1.5", "2.5", "3.0"], ["b-run", "1", "4", "1.5", "–", "0.1"]]
    assert "b-run: train.gamma 7.0, first run 4.0" in lines and not any("steps" in line for line in lines)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["accept_len.png", "loss.png", "tau.png"]
    assert matplotlib.image.imread(tmp_path / "out" / "loss.png").std() > 0


def test_a_run_that_is_not_finite_shows_it_and_a_value_that_is_no_number_is_refused(tmp_path, capsys):
    good, null = {"step": 1, "loss": 1.0, "eval_tau": 2.0}, {"step": 2, "loss": None, "eval_tau": None}
    first, second = workdir(tmp_path / "a", 4.0, [good, null]), workdir(tmp_path / "b", 4.0, [good])
    assert run("compare", f"--runs={first},{second}", f"--output={tmp_path}/out") == 0
    assert "│ a   │    2 │  nan │" in capsys.readouterr().out
    third = workdir(tmp_path / "c", 4.0, [{"step": 1, "loss": "x"}])
    (tmp_path / "empty").mkdir()
    for runs, code, message in (
        (f"{first},{third}", 3, "loss of step 1"),
        (f"{first},{tmp_path}/empty", 2, "empty has no metrics.jsonl"),
        (f"{first},", 2, "empty entry"),
        (f"{first},{tmp_path}/a/../a", 2, "twice"),
    ):
        assert run("compare", f"--runs={runs}", f"--output={tmp_path}/out") == code
        assert message in capsys.readouterr().err
