"""benchmarks/studies/study.py: stages run once, continue, stop at the limit, and are refused with other flags."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time

import pytest

from benchmarks.studies import study
from benchmarks.studies.study import OutOfTime, Stage, Study
from domino_jax.runtime.errors import DominoError
from tests.helpers.studies import stand_in

WORKER = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1].split("=", 1)[1])
folder.mkdir(exist_ok=True)
starts = folder / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
kind = sys.argv[2].split("=", 1)[1]
if kind == "slow" and len(starts.read_text()) == 1:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
    (folder / "ready").touch()
    time.sleep(60)
if kind == "broken":
    print("first\\nsecond\\nlast words")
    sys.exit(3)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A module that can be run as a stage: it counts its starts, and may be slow or fail."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    return "worker"


def stage(worker, kind="quick", name="stage", **flags):
    return Stage(name, worker, {"workdir": "", "kind": kind, **flags}, ("workdir", f"{name}.folder"))


def starts(folder):
    return len((folder / "starts").read_text())


def test_a_finished_stage_is_not_run_again(tmp_path, worker):
    for _ in range(2):
        folder = Study(tmp_path / "work").run(stage(worker))
    assert starts(folder) == 1
    record = json.loads((tmp_path / "work" / "stage.json").read_text())
    assert record["finished"] and record["module"] == "worker"


def test_other_flags_are_refused_also_for_an_unfinished_stage(tmp_path, worker):
    Study(tmp_path).run(stage(worker))
    with pytest.raises(DominoError, match="other flags: kind was quick and is slow"):
        Study(tmp_path).run(stage(worker, "slow"))
    with pytest.raises(DominoError, match="left with exit code 3"):
        Study(tmp_path).run(stage(worker, "broken", "other"))
    with pytest.raises(DominoError, match="other flags: size was absent and is 5"):
        Study(tmp_path).run(stage(worker, "broken", "other", size=5))


def test_a_brief_stage_with_other_flags_is_run_again(tmp_path, worker):
    for size, count in ((1, 1), (1, 1), (2, 2), (2, 2), (1, 3)):
        folder = Study(tmp_path).run(dataclasses.replace(stage(worker, size=size), brief=True))
        assert starts(folder) == count
    assert json.loads((tmp_path / "stage.json").read_text())["flags"]["size"] == "1"


def test_a_value_of_the_recipe_may_be_overridden(tmp_path):
    assert Study(tmp_path).of_recipe("decode.tree.nodes") == 16
    assert Study(tmp_path, ["--config.decode.tree.nodes=32"]).of_recipe("decode.tree.nodes") == "32"


def test_a_moved_workdir_keeps_its_stages(tmp_path, worker):
    before, after = tmp_path / "before", tmp_path / "after"
    Study(before).run(stage(worker, rows=before / "rows"))
    before.rename(after)
    assert starts(Study(after).run(stage(worker, rows=after / "rows"))) == 1


def test_a_failure_shows_the_end_of_the_log_and_is_tried_again(tmp_path, worker):
    for count in (1, 2):
        with pytest.raises(DominoError) as failed:
            Study(tmp_path).run(stage(worker, "broken"))
        assert "stage left with exit code 3" in str(failed.value) and "last words" in str(failed.value)
        assert len(str(failed.value).splitlines()) <= 5
        assert starts(tmp_path / "stage.folder") == count


def test_at_the_limit_a_stage_saves_and_a_later_start_continues_it(tmp_path, worker, monkeypatch):
    monkeypatch.setattr(study, "MINUTE", 1.0)
    with pytest.raises(OutOfTime, match="stage was stopped with everything saved") as stopped:
        Study(tmp_path, minutes=2.0).run(stage(worker, "slow"))
    assert stopped.value.exit_code == 42
    over = Study(tmp_path, minutes=1e-9)
    with pytest.raises(OutOfTime, match="the time is over before next"):
        over.run(stage(worker, name="next"))
    assert starts(Study(tmp_path).run(stage(worker, "slow"))) == 2
    assert json.loads((tmp_path / "stage.json").read_text())["seconds"] > 1


def test_a_signal_to_the_study_stops_its_stage(tmp_path, worker):
    def send():
        while not (tmp_path / "stage.folder" / "ready").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    with pytest.raises(OutOfTime, match="start again to continue"):
        Study(tmp_path).run(stage(worker, "slow"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_exit_codes_are_those_of_the_commands(capsys):
    def leave(error):
        def main():
            raise error

        with pytest.raises(SystemExit) as left:
            study.run_main(main)
        return left.value.code

    assert leave(OutOfTime("later")) == 42
    assert leave(DominoError("wrong")) == 2
    assert capsys.readouterr().err == "later\nerror: wrong\n"


def test_trainings_and_decodings_are_the_real_commands(tmp_path, monkeypatch):
    commands = []
    stand_in(monkeypatch, lambda study, command, name: commands.append((name, command)))
    work = Study(tmp_path, ["--config.train.batch_size=2", "--config.data.train=PROMPTS"])
    assert work.answers() == tmp_path / "rows.jsonl"
    folder = work.train("domino", {"train.gamma": 3.0}, seed=1, steps=10)
    [(_, answers), (name, train)] = commands
    assert answers[0] == "domino_jax.regenerate" and "--prompts=PROMPTS" in answers
    assert name == "domino_seed1_steps10" and folder == tmp_path / name and train[0] == "domino_jax.train"
    wanted = ["config.seed=1", "config.train.steps=10", "config.train.gamma=3.0", "config.train.batch_size=2"]
    wanted += ["config.eval.every=3", f"config.data.train={tmp_path / 'rows.jsonl'}", f"workdir={folder}"]
    assert {f"--{flag}" for flag in wanted} <= set(train)
    (tmp_path / "chain").mkdir()
    (tmp_path / "chain" / "report.json").write_text('{"format": 2}')
    assert work.decode("chain", folder, {"decode.temperature": 1.0}) == {"format": 2}
    assert commands[2][1][0] == "domino_jax.decode"
    assert {f"--config.drafter.path={folder}", f"--output={tmp_path / 'chain'}"} <= set(commands[2][1])


def test_this_interpreter_runs_the_stages(tmp_path, worker):
    Study(tmp_path).run(stage(worker, "quick"))
    assert sys.executable and (tmp_path / "stage.log").exists() and (tmp_path / ".xla_cache").is_dir()
