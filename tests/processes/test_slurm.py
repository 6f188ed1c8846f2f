"""launch/slurm.sbatch under a real Slurm on the loopback (tests/helpers/slurm_cluster.py): pytest -m slow."""

import signal
import sys
import time

import pytest

from tests.helpers import slurm_cluster
from tests.helpers.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=f"not installed: {slurm_cluster.missing()}"),
]
CPU_FORM = ("--gpus-per-node=0", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=10")
SAVES = "trap 'exit 42' TERM; echo up; for i in {1..300}; do sleep 0.1; done"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster.running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def submit(slurm, folder, *command, options=(), partition="low"):
    """The job's number; its output goes to folder/log."""
    words = ["sbatch", "--parsable", f"--partition={partition}", f"--output={folder}/log", *CPU_FORM, *options]
    return slurm.run(*words, str(ROOT / "launch" / "slurm.sbatch"), "--", *command, cwd=folder)


def log(folder):
    path = folder / "log"
    return path.read_text() if path.exists() else ""


def wait_for_text(folder, text, count=1, seconds=30):
    end = time.monotonic() + seconds
    while log(folder).count(text) < count:
        assert time.monotonic() < end, log(folder)
        time.sleep(0.1)


def start_again_now(slurm, folder, number, seconds=30):
    """Without the two minutes that Slurm waits before it starts a requeued job, but not before the nodes are ready.

    Until the next second a node takes the new start's credential for the one that the requeue has revoked: the job
    fails. And a daemon of the first start's steps removes, when it ends, a socket of the same name.
    """
    wait_for_text(folder, "back into the queue", seconds=seconds)
    slurm.wait(number, "PENDING")
    slurm.wait_for_step_daemons(number)
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now+1")


def test_two_tasks_on_each_of_two_nodes_run_the_words(slurm, tmp_path):
    program = "import os, sys; print(os.environ['SLURM_PROCID'], os.environ['SLURM_CPUS_PER_TASK'], sys.argv[1:])"
    number = submit(slurm, tmp_path, sys.executable, "-c", program, "a b", "$x;d", options=["--nodes=2"])
    assert slurm.wait(number, "COMPLETED", "FAILED") == "COMPLETED"
    assert sorted(log(tmp_path).splitlines()) == [f"{process} 1 ['a b', '$x;d']" for process in range(4)]


def test_a_cancelled_job_stays_cancelled(slurm, tmp_path):
    number = submit(slurm, tmp_path, "bash", "-c", SAVES)
    wait_for_text(tmp_path, "up", 2)
    slurm.run("scancel", number)
    time.sleep(8)  # longer than KillWait
    job = slurm.job(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    assert "cancelled: not started again" in log(tmp_path)


def test_a_preempted_job_saves_goes_back_into_the_queue_and_continues(slurm, tmp_path):
    command = f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0; {SAVES}'
    number = submit(slurm, tmp_path, "bash", "-c", command, options=["--nodes=2", "--ntasks-per-node=4"])
    wait_for_text(tmp_path, "up", 8)
    (tmp_path / "other").mkdir()
    other = submit(slurm, tmp_path / "other", "sleep", "1", options=["--nodes=2"], partition="high")
    assert slurm.wait(other, "COMPLETED", "FAILED") == "COMPLETED"
    start_again_now(slurm, tmp_path, number)
    assert slurm.wait(number, "COMPLETED", "FAILED") == "COMPLETED"


@pytest.mark.parametrize("code", [3, 1])
def test_the_code_of_the_task_that_failed_is_final_though_the_others_are_killed(slurm, tmp_path, code):
    command = f'if [ "$SLURM_PROCID" = 1 ]; then sleep 1; exit {code}; fi; sleep 60'
    number = submit(slurm, tmp_path, "bash", "-c", command)
    assert slurm.wait(number, "COMPLETED", "FAILED") == "FAILED"
    assert slurm.job(number)["ExitCode"] == f"{code}:0"
    assert not list(tmp_path.glob(".exit-codes*"))


@pytest.mark.parametrize("code", [43, 128 + signal.SIGABRT])
def test_a_hung_step_and_a_lost_peer_go_back_into_the_queue(slurm, tmp_path, code):
    command = f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0; [ "$SLURM_PROCID" = 0 ] || sleep 60; exit {code}'
    number = submit(slurm, tmp_path, "bash", "-c", command)
    start_again_now(slurm, tmp_path, number)
    assert slurm.wait(number, "COMPLETED", "FAILED") == "COMPLETED"


def test_the_end_of_the_time_saves_and_requeues(slurm, tmp_path):
    command = f'[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] || exit 0; {SAVES}'
    # Slurm looks for the signal's time about once a minute; with 1 minute and TERM@60 that is soon.
    number = submit(slurm, tmp_path, "bash", "-c", command, options=["--time=1", "--signal=TERM@60"])
    start_again_now(slurm, tmp_path, number, seconds=100)
    assert slurm.wait(number, "COMPLETED", "FAILED") == "COMPLETED"
