"""launch.local and launch.host with small programs in place of training: who starts again, who is ended and how."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.paths import ROOT

# A run that saves on SIGTERM and leaves with 42.
SAVES = """
import os, signal, sys, time
def save(*_):
    os.write(1, b"saved\\n")  # not print: the signal may come within the print below
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""
# The first attempt of each rank leaves with what the test names, the second one well.
ONCE = """
import os, signal, sys
rank = os.environ["JAX_PROCESS_ID"]
print("start", flush=True)
if rank == "1" and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    END
"""


def start(*words, **environment):
    command = [sys.executable, "-m", *map(str, words)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, **pipes)


def local(folder, program, *flags):
    """launch.local with a Python program in each of two ranks."""
    flags = [f"--log_dir={folder}/logs", *flags]
    return start("launch.local", *flags, "--", sys.executable, "-c", program, folder / "mark")


def log(folder, rank):
    return (folder / "logs" / f"rank-{rank}.log").read_text()


@pytest.mark.parametrize("end", ["sys.exit(42)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_all_ranks_start_again_after_a_code_of_the_table_and_after_signals(tmp_path, end):
    process = local(tmp_path, ONCE.replace("END", end), "--grace=1")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert log(tmp_path, 0) == log(tmp_path, 1) == "start\nstart\n"


@pytest.mark.parametrize(
    ("end", "flags", "code"),
    [("sys.exit(43)", ["--max_restarts=0"], 43), ("sys.exit(3)", ["--grace=1"], 3)],
    ids=["restarts are bounded", "another failure is final"],
)
def test_a_run_that_is_not_started_again_leaves_with_its_code(tmp_path, end, flags, code):
    process = local(tmp_path, ONCE.replace("END", end), *flags)
    process.communicate(timeout=60)
    assert process.returncode == code and log(tmp_path, 1) == "start\n"


def test_a_survivor_is_ended_after_the_grace(tmp_path):
    program = "import os, sys, time\nif os.environ['JAX_PROCESS_ID'] == '0': sys.exit(4)\ntime.sleep(60)"
    started = time.monotonic()
    process = local(tmp_path, program, "--grace=0.5")
    process.communicate(timeout=60)
    assert process.returncode == 4 and time.monotonic() - started < 40


def test_sigterm_reaches_every_rank_which_saves_and_nothing_starts_again(tmp_path):
    process = local(tmp_path, SAVES)
    assert process.stdout.readline() == "up\n"
    while "up" not in log(tmp_path, 1):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 42
    assert log(tmp_path, 0) == log(tmp_path, 1) == "up\nsaved\n"


@pytest.fixture
def host(tmp_path):
    """Starts launch.host with this test's lock and log, running a Python program."""
    processes = []

    def run(program, *flags):
        command = ["launch.host", *flags, f"--log={tmp_path}/log", "--", sys.executable, "-c", program]
        words = ["launch.host", "--stop"] if program == "--stop" else command
        processes.append(start(*words, DOMINO_LOCK=str(tmp_path / "lock")))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()


def test_the_end_of_the_tether_saves_the_run(host, tmp_path):
    process = host(SAVES, "--tether")
    assert process.stdout.readline() == "up\n"
    process.stdin.close()
    assert process.wait(60) == 42
    assert (tmp_path / "log").read_text() == "up\nsaved\n"


def test_a_machine_has_one_run_which_stop_lets_save(host, tmp_path):
    first = host(SAVES, "--max_restarts=50")
    assert first.stdout.readline() == "up\n"
    assert host("print('started')", "--wait=0.5").wait(60) == 2
    assert host("--stop").wait(60) == 0
    assert first.wait(60) == 42
    assert (tmp_path / "log").read_text() == "up\nsaved\n"
