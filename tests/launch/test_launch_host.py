"""launch.host with small programs in place of training: one run on a machine, its tether, its signals, its end."""

import fcntl
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from launch import host as launch_host
from tests.helpers.launch_stand_ins import leaves
from tests.helpers.paths import ROOT

SAVES = """
import signal, sys, time
def save(*_):
    print("saving", flush=True)
    time.sleep(0.5)
    open(sys.argv[1], "w").write("saved")
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def host(tmp_path):
    """Starts launch.host with this test's own lock and log; what is left of it is killed."""
    started = []

    def start(*words, stdin=subprocess.DEVNULL):
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.host", *words],
            cwd=ROOT,
            env={**os.environ, "DOMINO_LOCK": str(tmp_path / "lock")},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        for end in filter(None, (process.stdin, process.stdout, process.stderr)):
            end.close()


def saving(tmp_path, *flags):
    return [*flags, f"--log={tmp_path}/log", "--", sys.executable, "-c", SAVES, str(tmp_path / "state")]


def up(process):
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("broken", [False, True], ids=["the input ends", "the connection breaks"])
def test_the_end_of_the_tether_saves_the_run_also_without_an_output(host, tmp_path, broken):
    process = up(host(*saving(tmp_path, "--tether"), stdin=subprocess.PIPE))
    for end in (process.stdout, process.stderr)[: 2 * broken]:
        end.close()
    process.stdin.close()
    assert process.wait(20) == 42
    assert (tmp_path / "state").read_text() == "saved"
    assert (tmp_path / "log").read_text() == "up\nsaving\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_no_signal_leaves_the_command_running(host, tmp_path, number):
    command = f"trap 'exit 42' {int(number)}; echo $$; while :; do sleep 0.1; done"
    process = host(f"--log={tmp_path}/log", "--", "bash", "-c", command)
    pid = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(20) == 42
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_second_run_does_not_start_beside_the_first_and_does_when_that_has_left(host, tmp_path):
    first = up(host(*saving(tmp_path, "--tether"), stdin=subprocess.PIPE))
    second = host("--wait=0.5", f"--log={tmp_path}/other", "--", "echo", "started")
    out, error = second.communicate(timeout=20)
    assert (second.returncode, out) == (2, "")
    assert f"process {first.pid} has a run on this machine" in error
    third = host(f"--log={tmp_path}/other", "--", "bash", "-c", f"cat {tmp_path}/state")
    assert "waiting" in third.stderr.readline()
    assert first.poll() is None
    first.stdin.close()
    assert third.communicate(timeout=20)[0] == "saved"
    assert third.returncode == 0


def test_stop_lets_the_run_save_and_waits_for_it(host, tmp_path):
    process = up(host(*saving(tmp_path, "--max_restarts=50")))
    assert (tmp_path / "lock").read_text() == str(process.pid)
    stopping = host("--stop")
    assert stopping.wait(20) == 0
    assert (tmp_path / "state").read_text() == "saved"
    assert (process.wait(5), (tmp_path / "lock").read_text()) == (42, "")
    again = host("--stop")
    assert again.wait(20) == 0
    assert "no run on this machine" in again.stderr.read()


@pytest.mark.parametrize("content", ["", "no number", "dead"])
def test_stop_waits_for_a_run_that_does_not_say_which_process_it_is(host, tmp_path, content):
    dead = subprocess.Popen(["true"])
    dead.wait()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(content.replace("dead", str(dead.pid)))
        lock.flush()
        stopping = host("--stop")
        with pytest.raises(subprocess.TimeoutExpired):
            stopping.wait(1)
    assert stopping.wait(10) == 0


def test_machines_that_share_a_home_have_their_own_locks(monkeypatch):
    monkeypatch.delenv("DOMINO_LOCK", raising=False)
    paths = set()
    for name in ("gpu-0", "gpu-1"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        paths.add(launch_host.lock_path())
    assert len(paths) == 2
    assert {path.parent for path in paths} == {pathlib.Path.home()}


def test_a_lock_that_cannot_be_opened_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DOMINO_LOCK", str(tmp_path / "missing" / "lock"))
    with leaves(2, capsys, "DOMINO_LOCK"):
        launch_host.main(["--stop"])


@pytest.mark.parametrize(
    ("codes", "left", "runs"), [([0], 0, 1), ([4], 4, 1), ([43, 137, 3], 3, 3), ([42, 42, 42], 42, 2)]
)
def test_a_machine_starts_again_by_the_table_and_as_often_as_allowed(host, tmp_path, codes, left, runs):
    counter = (
        f'cd {tmp_path}; n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) > n; codes=("$@"); exit "${{codes[$n]}}"'
    )
    restarts = 2 if runs == 3 else 1
    process = host(
        f"--max_restarts={restarts}", f"--log={tmp_path}/log", "--", "bash", "-c", counter, "x", *map(str, codes)
    )
    started = time.monotonic()
    assert process.wait(30) == left
    assert int((tmp_path / "n").read_text()) == runs
    assert time.monotonic() - started >= [0, 0, 1, 3][runs]  # the pauses
