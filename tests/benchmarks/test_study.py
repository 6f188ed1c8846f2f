"""benchmarks/studies/study.py: stages run once, continue, stop at the limit, and are refused with other flags."""

import json
import os
import signal
import threading
import time

import pytest

from benchmarks.studies import study
from benchmarks.studies.study import OutOfTime, Stage, Study
from domino_jax.runtime.errors import DominoError

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
