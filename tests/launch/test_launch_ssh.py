"""launch.ssh with a stand-in for ssh that runs the remote command here."""

import os
import signal
import subprocess
import sys

import pytest

from launch import ssh, supervise
from tests.helpers.launch_stand_ins import SAVES, leaves, stand_in, wait_for
from tests.helpers.paths import ROOT

# A host's lock is its own, though all hosts are this machine.
SSH = """
host=${@: -2:1} command=${@: -1}
if [ "$1" != -G ] && [ "$host" = typo ]; then echo "Could not resolve hostname $host" >&2; exit 255; fi
if [ "$1" != -G ] && [ "$host" = flaky ]; then sleep 1; exit 255; fi
if [ "$1" = -G ]; then name=${@: -1}; echo "hostname ${name#*@}.internal"; exit; fi
export DOMINO_LOCK=$HERE/lock-$host
exec sh -c "$command"
"""


@pytest.fixture
def machines(tmp_path):
    """A folder with the repository's launchers and an environment, as every host has it."""
    stand_in(tmp_path, "ssh", SSH)
    folder = tmp_path / "my folder"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (folder / "launch").symlink_to(ROOT / "launch")
    return tmp_path


def launched(machines, program, *words, hosts="me@a,b"):
    command = [sys.executable, "-m", "launch.ssh", f"--hosts={hosts}", f"--folder={machines}/my folder"]
    command += [f"--log_dir={machines}/logs", "--", "python", "-c", program, *words]
    environment = {**os.environ, "PATH": f"{machines}:{os.environ['PATH']}", "HERE": str(machines)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_words_run_in_the_environment_of_every_host_and_know_the_coordinator_by_its_real_name(machines):
    program = "import os, sys; e = os.environ; print(e['JAX_PROCESS_ID'], os.getcwd(), e['JAX_COORDINATOR_ADDRESS'], "
    program += "sys.executable, sys.argv[1:])"
    process = launched(machines, program, "a b", "c;d")
    assert process.wait(20) == 0, process.communicate()
    process.communicate()
    folder = machines / "my folder"
    for rank in (0, 1):
        (line,) = (machines / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert line == f"{rank} {folder} a.internal:8476 {folder}/.venv/bin/python ['a b', 'c;d']"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_however_the_launcher_ends_every_host_saves(machines, number):
    process = launched(machines, SAVES)
    logs = [machines / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    wait_for(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    process.send_signal(number)
    code = process.wait(20)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 42)
    host_log = machines / "my folder" / "logs" / "host.log"  # both hosts', who share the folder
    wait_for(lambda: host_log.read_text().count("saved") == 2)
    process.communicate()


@pytest.mark.parametrize("hosts", ["", "a,", ",a", "a,,b", "a, ,b"])
def test_an_empty_host_is_refused(hosts, capsys):
    with leaves(2):
        ssh.main([f"--hosts={hosts}", "--", "train"])
    assert capsys.readouterr().err.splitlines() == [
        f"error: --hosts={hosts}: a name is empty. Put one comma between two names and none at the end."
    ]


def test_a_host_that_cannot_be_reached_at_the_first_start_is_final_and_the_end_of_its_log_is_shown(machines):
    (machines / "logs").mkdir()
    log = machines / "logs" / "rank-1.log"
    log.write_text("of an earlier run\n")
    process = launched(machines, SAVES, hosts="a,typo")
    error = process.communicate(timeout=20)[1].decode()
    assert process.returncode == 2
    assert error == (
        f"launch: no connection (exit code 255). Check the host's name and the ssh key. The end of {log}:\n"
        "Could not resolve hostname typo\n"
    )


def test_a_connection_that_is_lost_later_starts_again(machines, monkeypatch, capfd):
    monkeypatch.setattr(supervise, "CONTACT_SECONDS", 0.2)
    monkeypatch.setenv("PATH", f"{machines}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(machines))
    flags = ["--hosts=flaky", f"--log_dir={machines}/logs", "--max_restarts=1"]
    assert ssh.main([*flags, "--", "train"]) == 255
    assert "ended with exit code 255; start 1 of 1 again" in capfd.readouterr().err


def test_a_lost_connection_of_a_later_attempt_starts_again(machines, monkeypatch, capfd):
    monkeypatch.setenv("PATH", f"{machines}:{os.environ['PATH']}")
    monkeypatch.setenv("HERE", str(machines))
    stand_in(machines, "ssh", '[ "$1" = -G ] && exit; n=$(wc -l < "$HERE/ssh.log"); [ "$n" = 2 ] && exit 42; exit 255')
    assert ssh.main(["--hosts=a", f"--log_dir={machines}/logs", "--max_restarts=2", "--", "train"]) == 255
    assert "ended with exit code 255; start 2 of 2 again" in capfd.readouterr().err
