"""launch.ssh through a real OpenSSH server on the loopback: pytest -m slow. Debian: apt-get install openssh-server."""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.helpers.paths import ROOT

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="not installed: OpenSSH's sshd and ssh"),
]
SERVER = """
ListenAddress 127.0.0.1
Port {port}
HostKey {here}/host_key
PidFile {here}/sshd.pid
AuthorizedKeysFile {here}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
AcceptEnv DOMINO_LOCK
"""
# Both aliases are this machine, so each has its own lock.
CLIENT = """
Host gpu-0
  SetEnv DOMINO_LOCK={here}/lock-0
Host gpu-1
  SetEnv DOMINO_LOCK={here}/lock-1
Host *
  HostName 127.0.0.1
  Port {port}
  IdentityFile {here}/key
  StrictHostKeyChecking no
  UserKnownHostsFile {here}/known_hosts
"""


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A folder with an ssh that knows gpu-0 and gpu-1, while the server runs."""
    here = tmp_path_factory.mktemp("sshd")
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(here / name)], check=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    (here / "sshd_config").write_text(SERVER.format(port=port, here=here))
    (here / "ssh_config").write_text(CLIENT.format(port=port, here=here))
    (here / "bin").mkdir()
    ssh = here / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {here}/ssh_config "$@"\n')
    ssh.chmod(0o755)
    if os.geteuid() == 0:
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(here / "sshd_config")], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 20
    while subprocess.run([str(ssh), "gpu-0", "true"], capture_output=True, check=False).returncode:
        assert time.monotonic() < end and daemon.poll() is None
        time.sleep(0.2)
    yield here
    daemon.terminate()
    daemon.wait()


@pytest.fixture
def folder(tmp_path):
    """What every machine has: the launchers and an environment."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    return tmp_path


def launched(server, folder, program, *flags):
    command = [sys.executable, "-m", "launch.ssh", "--hosts=gpu-0,gpu-1", f"--folder={folder}", *flags]
    command += [f"--log_dir={folder}/logs", "--", "python", "-c", program, str(folder)]
    environment = {**os.environ, "PATH": f"{server}/bin:{os.environ['PATH']}"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


PROGRAM = """
import os, pathlib, signal, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ["JAX_PROCESS_ID"]
starts = here / f"starts-{rank}"
starts.write_text(starts.read_text() + "+" if starts.exists() else "+")
def save(*_):
    print("saving", flush=True)
    time.sleep(0.5)
    (here / f"saved-{rank}").write_text(str(os.getpid()))
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
print("up", sys.stdout.isatty(), os.environ["JAX_COORDINATOR_ADDRESS"], flush=True)
"""
WAITS = f"{PROGRAM}\nif starts.read_text() == '+':\n    time.sleep(60)"


def both_up(folder):
    logs = [folder / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    wait_for(lambda: all(log.exists() and "up" in log.read_text() for log in logs))


@pytest.mark.parametrize("code", [0, 3])
def test_words_names_and_exit_codes_go_through_a_real_connection(server, folder, code):
    process = launched(server, folder, f"{PROGRAM}\nsys.exit({code})")
    out = process.communicate(timeout=60)[0]
    assert process.returncode == code, out
    assert "up False 127.0.0.1:8476" in (folder / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_the_launcher_ends_both_machines_save(server, folder, number):
    process = launched(server, folder, WAITS)
    both_up(folder)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 42)
    wait_for(lambda: (folder / "saved-0").exists() and (folder / "saved-1").exists())
    assert (folder / "starts-0").read_text() == "+"


def test_after_a_reset_of_one_connection_the_run_saves_and_starts_again_only_then(server, folder):
    process = launched(server, folder, WAITS, "--grace=5")
    both_up(folder)
    shown = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    ours = (line for line in shown.splitlines() if f" -F {server}/ssh_config " in line and "gpu-1" in line)
    (client,) = [int(line.split()[0]) for line in ours]
    os.kill(client, signal.SIGKILL)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    assert (folder / "saved-1").exists()
    assert [(folder / f"starts-{rank}").read_text() for rank in (0, 1)] == ["++", "++"]
