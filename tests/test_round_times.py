"""round_times.py: each part of a round has a time of its own, and what is timed is the real thing."""

import pathlib

import pytest

from domino_jax.decoding import round_times
from domino_jax.loading import load_models, load_target
from tests.decoding_models import make_generator, random_models

ASSETS = pathlib.Path(__file__).resolve().parents[1] / "assets"
PROMPT = [5, 9, 2, 60, 7]


@pytest.fixture(scope="module")
def timed():
    """(generator, state, split by mode, seconds of a bare step)."""
    generator = make_generator(random_models())
    state = generator.start([PROMPT], [0])
    split = round_times.round_split(generator, state, ("backbone", "domino"), repeats=3)
    return generator, state, split, round_times.straight_step_seconds(generator, state, repeats=3)


def test_a_rounds_parts_are_timed_apart_in_every_drafting_mode(timed):
    _, state, split, step = timed
    assert set(split["backbone"]) == {"draft", "head", "verify", "commit", "other", "round"}
    assert set(split["domino"]) == {*split["backbone"], "without_head"}
    assert split["backbone"]["head"] == 0
    assert split["domino"]["without_head"] == split["backbone"]["round"]
    for parts in split.values():
        assert min(parts.values()) >= 0  # on a busy machine a part may vanish in the noise
    assert not state.done.any() and step > 0


def test_a_turn_costs_what_more_turns_cost_beyond_one():
    """A program of 30 s and 2 s a turn, and one call that was disturbed: a turn is 2 s."""
    calls = []

    def seconds(turns):
        calls.append(turns)
        return 30.0 + 2.0 * turns + 500.0 * (len(calls) == 5)

    assert round_times.turn_seconds({"one": seconds}, 3) == {"one": 2.0}
    assert calls == [1, round_times.LOOPED + 1] * 4


def test_timed_rounds_are_the_generators_own_program_and_leave_it_as_it_was(timed):
    generator, state, _, _ = timed
    assert {key[0] for key in generator.compiled} == {"prefill", "backbone", "domino"}
    assert generator.clock.decode_seconds == 0 and int(state.counts[0]) == 1


def test_other_is_what_the_parts_leave_of_the_round():
    seconds = {"draft": 1.0, "head": 2.0, "verify": 4.0, "commit": 0.5, "domino": 8.0, "backbone": 6.0}
    split = round_times._split("domino", seconds)
    assert (split["other"], split["round"], split["without_head"]) == (1.0, 8.0, 6.0)
    assert round_times._split("backbone", seconds)["other"] == 1.0


@pytest.mark.slow
def test_on_the_shipped_pair_the_head_costs_little_and_the_loop_next_to_nothing():
    """The head below 15 % of a round, the round below 1.10 × its parts; a busy machine gets three tries."""
    target = load_target(str(ASSETS / "tiny_qwen3"), "float32")
    models = load_models(target, str(ASSETS / "tiny_domino"), ("domino",))
    generator = make_generator(models, cache_slots=384, max_new_tokens=160)
    state = generator.start([list(range(100, 150))], [0])
    for _ in range(3):
        split = round_times.round_split(generator, state, ("domino",), repeats=31)["domino"]
        overhead = split["round"] / sum(split[part] for part in ("draft", "head", "verify", "commit"))
        head = 1 - split["without_head"] / split["round"]
        print(f"head {head:.1%} of the round, round {overhead:.3f} × its parts")
        if overhead < 1.10 and head < 0.15:
            return
    raise AssertionError(f"round {overhead:.3f} × its parts (below 1.10), head {head:.1%} (below 15 %)")
