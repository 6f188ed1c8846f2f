"""lanes.py: which figures of the answers are kept."""

from domino_jax.decoding.generate import Generation
from domino_jax.evals.lanes import LISTED, ModeRun


def test_of_answers_only_sums_and_two_numbers_each_are_kept():
    run = ModeRun()
    run.add([Generation([1, 2, 3], [2], "stop"), Generation([4, 5, 6, 7], [1, 2], "length")])
    run.add([Generation([1, 2, 3], [], "stop")])
    assert (run.answers, run.tokens, run.stopped, len(run.digests)) == (3, 10, 2, 2)
    assert (list(run.emitted), list(run.rounds), run.histogram) == ([2, 3, 0], [1, 2, 0], {2: 2, 1: 1})
    assert run.steps == 1 + 2 + 2  # rounds, or single tokens after the prefill's


def test_all_divergences_are_counted_and_the_first_are_listed():
    run = ModeRun()
    for place in range(LISTED + 5):
        run.add_comparison(2, [{"prompt": place, "near_tie": place % 2 == 0}])
    assert (run.compared, run.diverged, run.near_ties) == (2 * LISTED + 10, LISTED + 5, LISTED // 2 + 3)
    assert [entry["prompt"] for entry in run.first_divergences] == list(range(LISTED))
