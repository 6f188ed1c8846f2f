"""step_clock.py on a made-up time: what counts as work and what as waiting."""

import time

import pytest

from domino_jax.training.step_clock import StepClock


class Time:
    """A clock that moves only when it is set."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

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
        clock.step_done(4, 400)


def test_the_first_step_is_told_apart_and_counts_in_no_rate(clock_time):
    clock = StepClock()
    clock_time.passes(7)
    run_steps(clock, clock_time, 1, working=60.0)
    assert clock.first_step_seconds == 60.0
    assert set(clock.rates()) == set()


def test_rates_of_an_interval(clock_time):
    clock = StepClock()
    run_steps(clock, clock_time, 3)
    rates = clock.rates()
    # Two steps of 4 rows and 400 tokens after the first one, in 8 seconds.
    assert (rates["rows_per_second"], rates["tokens_per_second"]) == (1.0, 100.0)
    assert rates["data_wait"] == 0.25
    assert "mfu" not in rates


def test_evaluation_and_checkpoints_stand_aside(clock_time):
    clock = StepClock()
    run_steps(clock, clock_time, 2)
    with clock.aside():
        clock_time.passes(500)
    rates = clock.rates()
    assert rates["rows_per_second"] == 1.0 and rates["data_wait"] == 0.25


def test_mfu_is_the_lean_flops_against_the_peak_of_all_devices(clock_time):
    clock = StepClock(row_flops=lambda length: 1e9 * length, peak_flops=1e12)
    run_steps(clock, clock_time, 2)
    # 4 rows of 100 tokens: 4e11 FLOPs in 4 seconds.
    assert clock.rates()["mfu"] == pytest.approx(0.1)
