"""launch.local with small programs in place of training: who starts again, who is ended, and what is left of it."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.launch_stand_ins import PATIENCE, SAVES, wait_for
from tests.helpers.paths import ROOT


def launched(tmp_path, program, *flags):
    """The local launcher as a separate process, running a Python program in each of two ranks."""
    command = [sys.executable, "-m", "launch.local", f"--log_dir={tmp_path / 'logs'}", *flags]
    command += [
        "--",
        sys.executable,
        "-c",
        f"import os, sys, time, signal\nrank = os.environ['JAX_PROCESS_ID']\n{program}",
    ]
    environment = {**os.environ, "HERE": str(tmp_path)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process):
    out, error = process.communicate(timeout=PATIENCE)
    return process.returncode, out, error


def log(tmp_path, rank):
    return (tmp_path / "logs" / f"rank-{rank}.log").read_text()


def test_every_rank_has_its_place_its_log_and_a_free_port_of_the_loopback(tmp_path):
    names = ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "JAX_COORDINATOR_ADDRESS")
    process = launched(tmp_path, f"print(*(os.environ[name] for name in {names}))", "--devices=3")
    code, out, _ = finished(process)
    places = [log(tmp_path, rank).split() for rank in (0, 1)]
    assert (code, out.split()) == (0, places[0])
    assert [place[:4] for place in places] == [[str(rank), "2", "cpu", "3"] for rank in (0, 1)]
    assert places[0][4] == places[1][4] and re.fullmatch(r"127\.0\.0\.1:\d+", places[0][4])


# The first attempt leaves with what the test names, the second one well.
ONCE = "first = not os.path.exists(f'{os.environ[\"HERE\"]}/{rank}')\nopen(f'{os.environ[\"HERE\"]}/{rank}', 'w')\n"


@pytest.mark.parametrize("end", ["sys.exit(42)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_all_ranks_start_again_after_a_code_of_the_table_and_after_signals(tmp_path, end):
    program = f"print('start')\n{ONCE}\nif first and rank == '1':\n    {end}"
    code, _, error = finished(launched(tmp_path, program))
    assert code == 0
    assert log(tmp_path, 0) == log(tmp_path, 1) == "start\nstart\n"
    assert "start 1 of 50 again in 1 s" in error


@pytest.mark.parametrize(("end", "code"), [("sys.exit(42)", 42), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_restarts_are_bounded(tmp_path, end, code):
    assert finished(launched(tmp_path, f"print('start')\n{end}", "--max_restarts=1"))[0] == code
    assert log(tmp_path, 1) == "start\nstart\n"


def test_another_failure_is_final_and_wins_over_the_signals_it_caused(tmp_path):
    program = (
        "print('start')\nif rank == '1':\n    time.sleep(0.5)\n    sys.exit(3)\nos.kill(os.getpid(), signal.SIGABRT)"
    )
    assert finished(launched(tmp_path, program))[0] == 3
    assert log(tmp_path, 1) == "start\n"


def test_a_survivor_is_ended_after_the_grace(tmp_path):
    started = time.monotonic()
    program = "if rank == '0':\n    sys.exit(4)\ntime.sleep(60)"
    assert finished(launched(tmp_path, program, "--grace=0.5"))[0] == 4
    assert time.monotonic() - started < 10


def up(process, tmp_path):
    """Wait until both ranks run."""
    assert process.stdout.readline() == "up\n"
    wait_for(lambda: "up" in log(tmp_path, 1))
    return process


@pytest.mark.parametrize(
    ("number", "closed"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGHUP, False), (signal.SIGHUP, True)],
)
def test_a_signal_reaches_every_rank_which_saves_and_nothing_starts_again(tmp_path, number, closed):
    process = up(launched(tmp_path, SAVES), tmp_path)
    if closed:
        process.stdout.close()
        process.stderr.close()
    process.send_signal(number)
    assert process.wait(PATIENCE) == 42
    assert log(tmp_path, 0) == log(tmp_path, 1) == "up\nsaved\n"
    if not closed:
        process.communicate()


def test_ranks_that_do_not_leave_are_no_success(tmp_path):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
    process = up(launched(tmp_path, deaf, "--grace=0.5"), tmp_path)
    process.send_signal(signal.SIGTERM)
    assert finished(process)[0] == 137


def test_under_nohup_a_closed_terminal_is_ignored(tmp_path):
    release = tmp_path / "release"
    program = f"print('up', flush=True)\nwhile not os.path.exists({str(release)!r}):\n    time.sleep(0.05)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited, as from nohup
    try:
        process = launched(tmp_path, program)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGHUP)
    release.touch()
    assert finished(process)[0] == 0


def test_what_a_killed_rank_had_started_ends_with_it_and_nothing_else_does(tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        program = (
            "import subprocess\n"
            "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "print(worker.pid, flush=True)\nopen(f'{os.environ[\"HERE\"]}/up-{rank}', 'w')\n"
            "while rank == '1' and not os.path.exists(f'{os.environ[\"HERE\"]}/up-0'):\n    time.sleep(0.05)\n"
            "if rank == '1':\n    sys.exit(4)\ntime.sleep(60)"
        )
        assert finished(launched(tmp_path, program, "--grace=0.5"))[0] == 4
        workers = [int(log(tmp_path, rank)) for rank in (0, 1)]
        wait_for(lambda: not any(is_running(worker) for worker in workers))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # dead, and not yet collected by whoever inherited it
