"""preemption.py: SIGTERM ends a run with a checkpoint of its last step, or at once where everything is saved."""

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from domino_jax.runtime.preemption import PREEMPTED, Preempted, Preemption
from domino_jax.training.checkpoints import Checkpoints
from tests.helpers.paths import ROOT

# A training loop without a model: the state is the step it was taken after.
TRAINS = """
import sys, time
import jax, jax.numpy as jnp
from domino_jax.runtime import distributed
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.runtime.preemption import PREEMPTED, Preemption

distributed.initialize("auto")
state = {"step": jnp.int32(0)}
with Checkpoints(sys.argv[1], keep=3) as checkpoints:
    restored = checkpoints.restore_latest(jax.eval_shape(lambda: state))
    first = restored.step if restored else 0
    with Preemption() as preemption:
        print("ready", first, flush=True)
        for done in range(first + 1, 1500):
            time.sleep(0.02)
            state = {"step": jnp.int32(done)}
            if preemption.reached(done):
                checkpoints.save(done, state, {"item": done}, {})
                checkpoints.wait()
                print("saved", done, flush=True)
                sys.exit(PREEMPTED)
"""
# A phase without anything to lose, blocked in C with the signal kept from Python, as in a compilation.
BLOCKED = """
import ctypes
from domino_jax.runtime.preemption import Preemption
with Preemption() as preemption, preemption.nothing_to_lose():
    print("ready", flush=True)
    ctypes.CDLL(None).sleep(60)
"""


def stopped(code, *arguments, number=signal.SIGTERM):
    """(exit code, output) of a program that got the signal as soon as it was ready."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith(("ready", "topology"))
    if code == TRAINS:
        assert process.stdout.readline().startswith("ready")
    time.sleep(0.3)
    started = time.monotonic()
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert time.monotonic() - started < 10 * max(1, os.getloadavg()[0] / os.cpu_count())
    return process.returncode, output


def test_a_signal_at_a_step_saves_it_and_exits_42_and_so_does_the_next_start(tmp_path):
    steps = []
    for number in (signal.SIGTERM, signal.SIGHUP):
        code, output = stopped(TRAINS, tmp_path, number=number)
        assert code == PREEMPTED == 42
        steps.append(int(output.split("saved")[1]))
        with Checkpoints(tmp_path, keep=3) as checkpoints:
            step, state, data_state, _ = checkpoints.restore_latest({"step": jax.ShapeDtypeStruct((), np.int32)})
        assert (step, int(state["step"]), data_state) == (steps[-1], steps[-1], {"item": steps[-1]})
    assert steps[0] < steps[1]


def test_where_everything_is_saved_the_signal_ends_a_blocked_process_at_once():
    assert stopped(BLOCKED)[0] == -signal.SIGTERM


@pytest.fixture
def handlers():
    """Puts the signals' handlers back after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_came_before_a_phase_without_anything_to_lose_ends_the_run_there(handlers):
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted), preemption.nothing_to_lose():
            raise AssertionError("the phase began")


def test_a_terminal_that_may_close_stays_ignored_under_nohup(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Preemption(report=pytest.fail) as preemption:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not preemption.reached(1)
        with preemption.nothing_to_lose():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
