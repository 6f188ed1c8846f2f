"""lanes.py: modes alternate on the same prompts with separate clocks, and which figures of the answers are kept."""

from domino_jax.decoding.generate import Clock, Generated, Generation
from domino_jax.evals.lanes import LISTED, Lane, ModeRun, take_turns
from tests.helpers.decoding_models import texts


def answers_of(*token_ids: list[int]) -> list[Generation]:
    return [Generation(tokens, [], "length") for tokens in token_ids]


class StubGenerator:
    """Answers with its mode's length; the first call of a mode compiles for a second. `asked` keeps every call."""

    def __init__(self):
        self.asked, self.warm = [], set()

    def generate(self, models, prompts, mode, requests):
        self.asked.append((models, mode, list(requests)))
        warm = mode in self.warm
        self.warm.add(mode)
        clock = Clock(0.0, 0.5 if warm else 10.0, 0.0 if warm else 1.0, len(prompts))
        return Generated(answers_of(*[[len(mode)] for _ in prompts]), clock)


def test_lanes_take_turns_on_the_same_prompts_each_with_its_own_clock():
    generator = StubGenerator()
    lanes = [Lane("a", "autoregressive", "one", generator), Lane("b", "domino", "two", generator)]
    take_turns(lanes, [[1], [2]], [4, 5], turn=0)  # warms up
    generator.asked.clear()
    measured = take_turns(lanes, [[1], [2]], [4, 5], turn=1)
    assert generator.asked == [("two", "domino", [4, 5]), ("one", "autoregressive", [4, 5])]
    assert list(measured) == ["a", "b"]
    assert texts(measured["b"][0]) == [[6], [6]]
    assert vars(measured["b"][1]) == {
        **vars(Clock()),
        "decode_seconds": 0.5,
        "decode_tokens": 2,
    }


def test_a_run_that_had_to_compile_is_made_again_and_only_its_compilation_counts():
    generator = StubGenerator()
    clock = take_turns([Lane("b", "domino", None, generator)], [[1]], [0], turn=0)["b"][1]
    assert len(generator.asked) == 2
    assert (clock.decode_seconds, clock.compile_seconds, clock.decode_tokens) == (0.5, 1.0, 1)


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
