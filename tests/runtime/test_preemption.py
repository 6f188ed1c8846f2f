"""preemption.py: SIGTERM ends a run with a checkpoint of its last step; a second signal ends even that."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from domino_jax.runtime.preemption import PREEMPTED, Preemption
from domino_jax.training.checkpoints import Checkpoints
from tests.helpers.paths import ROOT

# A training loop without a model: the state is the step it was taken after.
TRAINS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
import jax, jax.numpy as jnp
from domino_jax.runtime import distributed
from domino_jax.training import manifest
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.runtime.preemption import PREEMPTED, Preemption

workdir, mode, slow_from, *saved_steps = sys.argv[1:]
distributed.initialize(mode)
write = manifest.write

def slow(folder, step):
    if step >= int(slow_from):
        print("hashing", flush=True)
        time.sleep(60)
    write(folder, step)

manifest.write = slow
state = {"step": jnp.int32(0)}
with Preemption() as preemption, Checkpoints(workdir, keep=3) as checkpoints:
    restored = checkpoints.restore_latest(jax.eval_shape(lambda: state))
    first = restored.step if restored else 0
    print("ready", first, flush=True)
    if first:
        time.sleep(1.5)  # compiles
    for index in range(first, 1500):
        time.sleep(0.02)
        done = index + 1
        state = {"step": jnp.int32(done)}
        if preemption.reached(done):
            checkpoints.save(done, state, {"item": done}, {})
            checkpoints.wait()
            print("saved", done, flush=True)
            sys.exit(PREEMPTED)
        if str(done) in saved_steps:
            checkpoints.save(done, state, {"item": done}, {})
            print("step", done, flush=True)
"""


@contextlib.contextmanager
def training(workdir, mode, saves=(20,), slow_from=10_000):
    """A run that saves at these steps; hashing those from `slow_from` on takes a minute."""
    command = [sys.executable, "-c", TRAINS, str(workdir), mode, str(slow_from), *map(str, saves)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_until(process, start):
    for line in process.stdout:
        if line.startswith(start):
            return line.split()
    raise AssertionError(f"the run ended without saying {start!r}")


def ends(process, signal_number, within):
    """(exit code, number of the checkpoint that it saved); `within` is in seconds on a free core."""
    started = time.monotonic()
    process.send_signal(signal_number)
    rest = process.communicate(timeout=60)[0]
    crowd = max(1, os.getloadavg()[0] / os.cpu_count())  # other tests may run beside this one
    assert time.monotonic() - started < within * crowd
    message = [line.split()[1] for line in rest.splitlines() if line.startswith("saved")]
    return process.returncode, int(message[0]) if message else None


def restored_step(workdir):
    """The step a next start continues from, checked, and what it says."""
    lines = []
    with Checkpoints(workdir, keep=3, report=lines.append) as checkpoints:
        step, state, data_state, _ = checkpoints.restore_latest({"step": jax.ShapeDtypeStruct((), np.int32)})
    assert (int(state["step"]), data_state) == (step, {"item": step})
    return step, lines


def test_sigterm_saves_the_current_step_and_exits_42(tmp_path):
    with training(tmp_path, "auto") as process:
        read_until(process, "step 20")
        code, saved = ends(process, signal.SIGTERM, within=10)
    assert code == PREEMPTED == 42
    assert saved > 20 and restored_step(tmp_path) == (saved, [])
    # Again, before the resumed run has asked even once: its first step number is past what JAX would name. And
    # without JAX's services, the third time.
    for mode, before in (("auto", saved), ("off", saved + 1)):
        with training(tmp_path, mode) as process:
            assert read_until(process, "ready") == ["ready", str(before)]
            assert ends(process, signal.SIGTERM, within=30) == (42, before + 1)
    assert restored_step(tmp_path) == (saved + 2, [])


def test_a_second_signal_during_that_save_ends_at_once_and_the_last_checkpoint_is_intact(tmp_path):
    with training(tmp_path, "auto", slow_from=21) as process:
        read_until(process, "step 20")
        process.send_signal(signal.SIGTERM)
        read_until(process, "hashing")
        code, saved = ends(process, signal.SIGINT, within=5)
    assert (code, saved) == (-signal.SIGINT, None)
    step, lines = restored_step(tmp_path)
    assert step == 20
    assert len(lines) == 1 and "was cut off" in lines[0]


def test_ctrl_c_waits_for_a_checkpoint_and_a_second_one_does_not(tmp_path):
    with training(tmp_path, "off", saves=(20, 40), slow_from=40) as process:
        read_until(process, "hashing")
        time.sleep(0.5)  # that line comes from another thread, a moment before the save is on its list
        process.send_signal(signal.SIGINT)
        read_until(process, "waits for the checkpoint")
        code, _ = ends(process, signal.SIGINT, within=5)
    assert code == -signal.SIGINT
    assert restored_step(tmp_path)[0] == 20


# Phases of a run, each blocked in C with the signal kept from the main thread, as in a compilation.
PHASES = """
import ctypes, os, signal, sys, threading, time
from domino_jax.runtime import distributed
from domino_jax.runtime.preemption import Preempted, Preemption

phase, mode = sys.argv[1:]
distributed.initialize(mode)

def block(seconds=60):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    print("blocked", flush=True)
    ctypes.CDLL(None).sleep(seconds)

with Preemption() as preemption:
    if phase == "nothing to lose":
        with preemption.nothing_to_lose():
            block()
    elif phase == "lost until saved":
        block(2)
        print("saved", 7, flush=True)
        with preemption.nothing_to_lose():
            time.sleep(60)
    elif phase == "polls":
        with preemption.nothing_to_lose(patience=20):
            print("blocked", flush=True)
            try:
                for _ in range(600):
                    preemption.poll(7)
                    time.sleep(0.1)
            except Preempted:
                print("saved", 7, flush=True)
                sys.exit(42)
    elif phase == "cannot poll":
        with preemption.nothing_to_lose(patience=1):
            block()
    elif phase == "stuck terminal":
        with preemption.nothing_to_lose():
            print("blocked", flush=True)
            reading, sys.stdout = sys.stdout, os.fdopen(os.pipe()[1], "w")
            sys.stdout.write("x" * 1_000_000)
            sys.stdout.flush()
sys.exit(1)
"""


@contextlib.contextmanager
def phase_of(name, mode):
    process = subprocess.Popen([sys.executable, "-c", PHASES, name, mode], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        read_until(process, "blocked")
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("phase", "mode", "number", "saved"),
    [
        ("nothing to lose", "auto", signal.SIGTERM, None),
        ("nothing to lose", "off", signal.SIGHUP, None),  # a closed terminal
        ("lost until saved", "auto", signal.SIGTERM, 7),
        ("polls", "auto", signal.SIGTERM, 7),
        ("cannot poll", "off", signal.SIGTERM, None),
        ("stuck terminal", "off", signal.SIGTERM, None),
    ],
)
def test_a_signal_in_a_phase_ends_it_with_42_once_nothing_is_lost_whatever_blocks(phase, mode, number, saved):
    with phase_of(phase, mode) as process:
        assert ends(process, number, within=10) == (PREEMPTED, saved)


@pytest.fixture
def handlers():
    """Puts the signals' handlers back after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_without_a_signal_it_is_never_reached_and_leaves_no_handler(handlers):
    before = signal.getsignal(signal.SIGTERM)
    with Preemption(report=pytest.fail) as preemption:
        assert signal.getsignal(signal.SIGTERM) is not before
        assert [preemption.reached(step) for step in range(3)] == [False] * 3
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_terminal_that_may_close_stays_ignored(handlers):
    """nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Preemption(report=pytest.fail) as preemption:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.2)
        assert not preemption.reached(1)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_signal_to_a_forked_child_is_not_the_parents(handlers):
    with Preemption(report=pytest.fail) as preemption:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        time.sleep(0.2)
        assert not preemption.reached(1)


def test_once_reached_it_stays_so_and_the_next_signals_are_the_kernels(handlers):
    lines = []
    with Preemption(report=lines.append) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a double, to the process and to its group, is one request
        time.sleep(0.2)  # a thread hears of it
        assert [preemption.reached(step) for step in (7, 8)] == [True, True]
        assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert lines == ["SIGTERM: stops after step 7, with a checkpoint; another signal ends it without"]
