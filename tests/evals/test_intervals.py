"""intervals.py: what is certain has no width, noise has the width that theory gives it, and equal seeds agree."""

import numpy as np
import pytest

from domino_jax.decoding.generate import Clock, Generation
from domino_jax.evals import intervals
from domino_jax.evals.lanes import ModeRun


def run_of(lengths, seconds):
    """One group an answer: rounds of `lengths`, a second count each."""
    run = ModeRun()
    for accepts, spent in zip(lengths, seconds, strict=True):
        run.add([Generation(list(range(1 + sum(accepts))), accepts, "length")])
        run.add_group(Clock(decode_seconds=spent, decode_tokens=sum(accepts)))
    return run


def test_prompts_that_are_all_alike_leave_no_doubt():
    run = run_of([[2, 4]] * 5, [3.0] * 5)
    found = intervals.mode_intervals(run, run_of([[6]] * 5, [6.0] * 5))
    assert found == {
        "tau_pooled": [3.0, 3.0],
        "tau_per_prompt": [3.0, 3.0],
        "tokens_per_second": [2.0, 2.0],
        "speedup": [2.0, 2.0],
    }


def test_the_width_is_that_of_the_normal_law():
    values = np.random.default_rng(1).normal(5.0, 1.0, 400)
    [(low, high)] = intervals.ratio_intervals([(values, np.ones(400))])
    assert (low, high) == pytest.approx((values.mean() - 1.96 / 20, values.mean() + 1.96 / 20), abs=0.02)


def test_what_disturbs_both_modes_of_a_group_cancels_in_the_speedup():
    noise = [1.0, 5.0, 2.0, 9.0]
    fast, slow = run_of([[4]] * 4, noise), run_of([[4]] * 4, [3 * spent for spent in noise])
    found = intervals.mode_intervals(fast, slow)
    assert found["speedup"] == pytest.approx([3.0, 3.0])
    assert found["tokens_per_second"][1] > 2 * found["tokens_per_second"][0]


def test_one_prompt_or_no_round_gives_no_interval():
    assert intervals.mode_intervals(run_of([[2]], [1.0]), None)["tau_pooled"] is None
    plain = intervals.mode_intervals(run_of([[], []], [1.0, 1.0]), None)
    assert (plain["tau_pooled"], plain["speedup"]) == (None, None)


def test_many_prompts_are_drawn_in_pieces_with_the_same_sums(monkeypatch):
    values = np.arange(12.0).reshape(6, 2)
    whole = intervals.resampled_sums(values)
    assert whole.shape == (intervals.RESAMPLES, 2)
    monkeypatch.setattr(intervals, "CHUNK", 60)
    assert np.array_equal(intervals.resampled_sums(values), whole)
