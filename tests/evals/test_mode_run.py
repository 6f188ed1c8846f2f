"""mode_run.py: figures of hand-made runs, to the digit; the width of intervals, and what cancels in them."""

import numpy as np
import pytest

from domino_jax.decoding.acceptance import acceptance_record
from domino_jax.decoding.generate import Clock
from domino_jax.evals.bootstrap import interval, pooled
from domino_jax.evals.mode_run import figures_of, intervals
from tests.helpers.report_runs import FAST, answer, run_of, two_runs


def figures(runs=None):
    return figures_of(runs or two_runs(), {"domino": 4})


def test_tau_counts_rounds_and_not_the_token_of_the_prefill():
    domino = figures()["domino"]
    assert (domino["rounds"], domino["tau_pooled"], domino["tau_per_prompt"]) == (6, 13 / 6, (8 / 4 + 5 / 2) / 2)
    plain = figures()["autoregressive"]
    assert plain["tau_pooled"] is plain["tau_per_prompt"] is plain["drafts_per_round"] is None
    assert plain["accept_histogram"] == {} and plain["accept_rate_by_position"] == []


def test_rates_leave_out_prefill_and_compilation_and_speedups_are_over_plain_decoding():
    modes = figures()
    plain, domino = modes["autoregressive"], modes["domino"]
    assert (plain["tokens_per_second"], domino["tokens_per_second"]) == (0.5, 2.0)
    assert (plain["speedup"], domino["speedup"], domino["milliseconds_per_token"]) == (1.0, 4.0, 500.0)
    assert (domino["prefill_seconds"], domino["compile_seconds"]) == (0.75, 4.0)
    assert (domino["tokens"], domino["decode_tokens"]) == (15, 13)
    # With prefills and first tokens.
    assert (plain["output_tokens_per_second"], domino["output_tokens_per_second"]) == (15 / 26.5, 15 / 7.25)
    assert domino["speedup_end_to_end"] == pytest.approx(26.5 / 7.25)
    alone = figures({"domino": run_of(FAST, Clock(0.75, 6.5, 4.0, 13))})["domino"]
    assert alone["speedup"] is alone["speedup_end_to_end"] is None


def test_divergences_are_counted_as_near_ties_or_violations():
    divergences = [{"prompt": 0, "near_tie": True}, {"prompt": 1, "near_tie": False}]
    counts = {"same": 0, "of": 2, "near_ties": 1, "violations": 1, "first_divergences": divergences}
    modes = figures(two_runs(divergences))
    assert modes["domino"]["identical"] == counts and modes["autoregressive"]["identical"] is None


# --------------------------------------------------------------------------------------------------- intervals


def groups_of(lengths, seconds):
    """One group an answer: rounds of `lengths`, a second count each."""
    answers = [answer(1 + sum(accepts), accepts) for accepts in lengths]
    run = run_of(answers, Clock())
    run.group_seconds[:] = seconds
    return run


def test_the_width_is_that_of_the_normal_law():
    values = np.random.default_rng(1).normal(5.0, 1.0, 400)
    low, high = interval(pooled, values, np.ones(400))
    assert (low, high) == pytest.approx((values.mean() - 1.96 / 20, values.mean() + 1.96 / 20), abs=0.02)


def test_what_disturbs_both_modes_of_a_group_cancels_in_the_speedup():
    noise = [1.0, 5.0, 2.0, 9.0]
    fast, slow = groups_of([[4]] * 4, noise), groups_of([[4]] * 4, [3 * spent for spent in noise])
    found = intervals(fast, slow)
    assert found["speedup"] == pytest.approx([3.0, 3.0])
    assert found["tokens_per_second"][1] > 2 * found["tokens_per_second"][0]


def test_one_prompt_or_no_round_gives_no_interval():
    assert intervals(groups_of([[2]], [1.0]), None)["tau_pooled"] is None
    plain = intervals(groups_of([[], []], [1.0, 1.0]), None)
    assert (plain["tau_pooled"], plain["speedup"]) == (None, None)


def test_draws_of_answers_with_a_single_token_have_no_rate():
    """The prefill gives that token, and the loop's first dispatch none."""
    few, slow = groups_of([[], [4]], [0.1, 1.0]), groups_of([[], [4]], [0.1, 2.0])
    assert intervals(few, slow)["speedup"] == pytest.approx([21 / 11, 2.0])
    none = groups_of([[], []], [1.0, 1.0])
    assert intervals(none, none)["speedup"] is None


def test_the_acceptance_record_counts_the_bonus_in_the_mean_length_alone():
    counts = {"num_accepted_draft_tokens": 6, "num_draft_tokens": 16, "num_spec_steps": 4, "num_spec_tokens": 4}
    shares = {"mean_acceptance_length": 2.5, "draft_acceptance_rate": 6 / 16}
    record = acceptance_record({1: 2, 3: 1, 5: 1}, drafts=16)
    assert record == {**shares, "acceptance_histogram": [2, 0, 1, 0, 1], **counts}
    assert acceptance_record({}, 0) is None
    adaptive = acceptance_record({1: 3, 9: 1}, drafts=8)  # three plain steps, and one of eight drafts
    assert (adaptive["num_spec_tokens"], adaptive["acceptance_histogram"]) == (8, [3, 0, 0, 0, 0, 0, 0, 0, 1])
