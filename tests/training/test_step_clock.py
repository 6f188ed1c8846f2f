"""step_clock.py on a made-up time: what counts as work and what as waiting."""

import time

import pytest

from domino_jax.training.step_clock import StepClock


@pytest.fixture
def passes(monkeypatch):
    """A function that moves the time, which does not move otherwise."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def run_steps(clock, passes, count, working=3.0):
    for _ in range(count):
        with clock.waiting_for_data():
            passes(1)
        passes(working)
        clock.step_done(4, 400)


def test_the_first_step_counts_in_no_rate(passes):
    clock = StepClock()
    passes(7)
    run_steps(clock, passes, 1, working=60.0)
    assert clock.first_step_seconds == 60.0 and clock.rates() == {}


def test_rates_of_an_interval_are_those_of_its_steps_without_what_is_aside(passes):
    """Two steps of 4 rows of 100 tokens after the first one, in 8 seconds."""
    clock = StepClock(row_flops=lambda length: 1e9 * length, peak_flops=1e12)
    run_steps(clock, passes, 3)
    with clock.aside():
        passes(500)
    expected = {"rows_per_second": 1.0, "tokens_per_second": 100.0, "data_wait": 0.25, "mfu": 0.1}
    assert clock.rates() == pytest.approx(expected)
