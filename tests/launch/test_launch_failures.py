"""Launchers on machines where something is missing: a program, room on the disk, a machine to run on."""

import signal
import subprocess
import sys

import pytest

from launch import commands, gcloud, local, ssh, supervise, tpu_vm, xpk
from tests.helpers.launch_stand_ins import leaves, wait_for
from tests.helpers.paths import ROOT


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A PATH without any program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("launcher", "flags", "program"),
    [
        (xpk, ["--name=n", "--cluster=c", "--type=t", "--image=i"], "xpk"),
        (tpu_vm, ["--name=n", "--zone=z", "--type=t", "--version=v"], "gcloud"),
        (ssh, ["--hosts=a,b", "--log_dir=logs"], "ssh"),
        (local, ["--log_dir=logs"], "train"),
    ],
)
def test_a_program_that_is_not_installed_is_one_sentence(bare, monkeypatch, capsys, launcher, flags, program):
    monkeypatch.chdir(bare)
    with leaves(2):
        launcher.main([*flags, "--", "train"])
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {program} is not installed, or not on the PATH."


def test_a_program_that_may_not_be_executed_is_one_sentence(bare, capsys):
    (bare / "gcloud").write_text("")
    for ask in (gcloud.ask, commands.run):
        with leaves(2, capsys, "gcloud cannot be started: Permission denied"):
            ask(["gcloud", "version"])


def rank(tmp_path, number, *command):
    return supervise.Rank(command, {}, tmp_path / f"rank-{number}.log")


@pytest.mark.parametrize("log", ["rank-1.log", "file/rank-1.log"])
def test_when_a_rank_cannot_start_the_others_do_not_stay(tmp_path, log):
    (tmp_path / "file").touch()  # no folder for a log
    first = rank(tmp_path, 0, "sleep", "60")
    second = supervise.Rank(["no-such-program"], {}, tmp_path / log)
    processes = []
    start = subprocess.Popen

    def noted(*given, **settings):
        processes.append(start(*given, **settings))
        return processes[-1]

    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as left:
        patched.setattr(subprocess, "Popen", noted)
        supervise.keep_running(lambda: [first, second], 5, 1)
    assert left.value.code == 2
    assert processes[0].poll() == -signal.SIGKILL


def test_a_full_disk_costs_the_log_and_not_the_run(tmp_path):
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    program = "for i in range(20_000): print('a line of the run', i)"
    command = [sys.executable, "-m", "launch.local", "--processes=1", f"--log_dir={tmp_path}", "--max_restarts=0"]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 20_000


@pytest.mark.parametrize(("ready", "attempts"), [(0, 1), (1, 3)])
def test_machines_that_are_not_ready_are_final_at_the_first_start_and_bounded_later(tmp_path, ready, attempts):
    made = []

    def ranks():
        made.append(len(made))
        if len(made) > ready:
            raise supervise.NotReady(7)
        return [rank(tmp_path, 0, "sh", "-c", "exit 42")]

    assert supervise.keep_running(ranks, 2, 1) == 7
    assert len(made) == attempts


def test_no_machine_to_run_on_is_refused(capsys):
    with leaves(2, capsys, "no machine"):
        supervise.keep_running(list, 5, 1)


def test_a_signal_that_comes_while_ranks_start_reaches_each_of_them_once(tmp_path, monkeypatch):
    program = "trap 'echo got' TERM; touch up-$0; for i in 1 2 3 4 5 6; do sleep 0.1; done; exit 42"
    ranks = [rank(tmp_path, n, "bash", "-c", f"cd {tmp_path}; {program}", str(n)) for n in (0, 1)]
    start = subprocess.Popen

    def signalled(*given, **settings):
        process = start(*given, **settings)
        wait_for((tmp_path / f"up-{given[0][-1]}").exists)
        if given[0][-1] == "0":
            signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", signalled)
    assert supervise.keep_running(lambda: ranks, 5, 10) == 42
    assert [(tmp_path / f"rank-{n}.log").read_text() for n in (0, 1)] == ["got\n", "got\n"]
