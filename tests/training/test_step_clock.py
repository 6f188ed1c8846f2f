"""step_clock.py on a made-up time: what counts as work, what as waiting, what a restart costs; and traces of steps."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from domino_jax.training.metrics import MetricsWriter
from domino_jax.training.step_clock import Profile, StepClock


class Time:
    """A clock that moves only when it is set; wall and monotonic time run together."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 1e9)

    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def clock_time(monkeypatch):
    return Time(monkeypatch)


def run_steps(clock, clock_time, count, waiting=1.0, working=3.0):
    for _ in range(count):
        with clock.waiting_for_data():
            clock_time.passes(waiting)
        clock_time.passes(working)
        clock.step_done(4, 400, jnp.int32(10))


def test_the_first_step_is_told_apart_and_counts_in_no_rate(clock_time):
    clock = StepClock()
    clock_time.passes(7)
    run_steps(clock, clock_time, 1, working=60.0)
    assert clock.first_step_seconds == 60.0
    assert set(clock.rates()) == {"goodput", "productive_seconds", "started", "cpu_seconds"}


def test_rates_of_an_interval(clock_time):
    clock = StepClock()
    run_steps(clock, clock_time, 3)
    rates = clock.rates()
    # Two steps of 4 rows, 400 tokens and 10 anchors after the first one, in 8 seconds.
    assert (rates["rows_per_second"], rates["tokens_per_second"], rates["anchors_per_second"]) == (1.0, 100.0, 2.5)
    assert rates["data_wait"] == 0.25
    assert "mfu" not in rates


def test_evaluation_and_checkpoints_stand_aside(clock_time):
    clock = StepClock()
    run_steps(clock, clock_time, 2)
    with clock.aside():
        clock_time.passes(500)
    rates = clock.rates()
    assert rates["rows_per_second"] == 1.0 and rates["data_wait"] == 0.25
    # 3 of the 508 seconds since the start: the first step is compilation, one second of the other is waiting.
    assert rates["goodput"] == pytest.approx(3 / 508)


def test_mfu_is_the_lean_flops_against_the_peak_of_all_devices(clock_time):
    clock = StepClock(row_flops=lambda length: 1e9 * length, peak_flops=1e12)
    run_steps(clock, clock_time, 2)
    # 4 rows of 100 tokens: 4e11 FLOPs in 4 seconds.
    assert clock.rates()["mfu"] == pytest.approx(0.1)


def logged_start(workdir, clock_time, first, last, every=2):
    """Trains steps first+1..last in `workdir` and logs every second one; returns the goodput of the last row."""
    with MetricsWriter(workdir, 20, start_step=first) as metrics:
        clock = metrics.clock()
        for step in range(first + 1, last + 1):
            run_steps(clock, clock_time, 1)
            if step % every == 0:
                rates = clock.rates()
                metrics.write(step, {"loss": 1.0, **rates})
    return rates


def test_goodput_counts_neither_lost_steps_nor_the_time_between_starts(tmp_path, clock_time):
    first = logged_start(tmp_path, clock_time, 0, 8)
    assert first["goodput"] == pytest.approx(7 * 3 / 32)
    clock_time.passes(168)
    # Taken up from step 4: of the first start 3 steps count (2, 3, 4), of the second 3 (6, 7, 8).
    second = logged_start(tmp_path, clock_time, 4, 8)
    assert second["productive_seconds"] == pytest.approx(18)
    assert second["started"] == first["started"]
    assert second["goodput"] == pytest.approx(18 / (32 + 168 + 16))


# ---------------------------------------------------------------- the trace of train.profile_steps


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What the profiler was asked to do, with the steps in between."""
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: seen.append(f"start {folder}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    return seen


def steps(profile: Profile, numbers, calls) -> None:
    for number in numbers:
        calls.append(f"step {number}")
        profile(SimpleNamespace(done=number, measured=jnp.zeros(())))


def test_a_trace_is_a_file_that_a_viewer_opens(tmp_path):
    with Profile(tmp_path, (1, 1)) as profile:
        profile(SimpleNamespace(done=1, measured=jax.jit(jnp.sin)(jnp.ones(8))))
    assert list(tmp_path.rglob("*.xplane.pb"))
