"""round_times.py: each part of a round is timed separately."""

import pytest

from domino_jax.evals import round_times
from tests.helpers.decoding_models import make_generator, random_models

PROMPT = [5, 9, 2, 60, 7]


@pytest.fixture(scope="module")
def timed():
    """(generator, state, split by mode)."""
    generator = make_generator(random_models(), max_new_tokens=2)
    generator.generate([PROMPT], "autoregressive")  # the program of steps is compiled, and timed as it is
    state, modes = generator.start([PROMPT], [0]), ("autoregressive", "backbone", "domino")
    return generator, state, round_times.round_split(generator.models, generator.generator, state, modes, repeats=1)


@pytest.mark.long
def test_a_rounds_parts_are_timed_apart_in_every_drafting_mode(timed):
    generator, state, split = timed
    assert set(split["backbone"]) == {"draft", "head", "verify", "commit", "other", "round"}
    assert set(split["domino"]) == set(split["backbone"])
    assert split["backbone"]["head"] == 0
    for parts in split.values():
        assert min(parts.values()) >= 0  # on a busy machine a part may vanish in the noise
    assert set(split["autoregressive"]) == {"round"}
    assert int(state.counts[0]) == 1 and not state.done.any()
