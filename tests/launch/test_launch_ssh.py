"""launch.ssh with a stand-in for ssh that runs the remote command here."""

import os
import signal
import subprocess
import sys

import pytest

from tests.helpers.launch_stand_ins import SAVES, stand_in, wait_for
from tests.helpers.paths import ROOT

# A host's lock is its own, though all hosts are this machine.
SSH = """
host=${@: -2:1} command=${@: -1}
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


def launched(machines, program, *words):
    command = [sys.executable, "-m", "launch.ssh", "--hosts=me@a,b", f"--folder={machines}/my folder"]
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
