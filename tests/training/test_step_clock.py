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


def test_rates_of_an_interval_are_those_of_its_steps_without_what_is_aside(passes):
    """Two steps of 4 rows of 100 tokens, in 8 seconds."""
    clock = StepClock(row_flops=lambda length: 1e9 * length, peak_flops=1e12)
    passes(60)
    clock.restart()  # after the first step
    assert clock.rates() == {}
    for _ in range(2):
        with clock.spent("data"):
            passes(1)
        passes(3)
        clock.step_done(4, 400)
    with clock.spent("aside"):
        passes(500)
    expected = {"rows_per_second": 1.0, "tokens_per_second": 100.0, "data_wait": 0.25, "mfu": 0.1}
    assert clock.rates() == pytest.approx(expected)
