"""round_times.py: each part of a round is timed separately."""

import pytest

from domino_jax.evals.round_times import round_seconds, round_split
from tests.helpers.decoding_models import make_generator, random_models

PROMPT = [5, 9, 2, 60, 7]


@pytest.mark.long
def test_a_rounds_parts_are_timed_apart_in_every_drafting_mode():
    made = make_generator(random_models(), max_new_tokens=2)
    made.generate([PROMPT], "autoregressive")  # the program of steps is compiled, and timed as it is
    state, modes = made.start([PROMPT], [0]), ("autoregressive", "backbone", "domino")
    split = round_split(made.models, made.generator, state, modes, repeats=1)
    assert set(split["backbone"]) == {"draft", "head", "verify", "commit", "other", "round"} == set(split["domino"])
    assert split["backbone"]["head"] == 0 and set(split["autoregressive"]) == {"round"}
    assert min(min(parts.values()) for parts in split.values()) >= 0  # on a busy machine a part may vanish in the noise
    assert int(state.counts[0]) == 1 and not state.done.any()
    seconds = round_seconds(made.models, made.generator.settings, [PROMPT], (3,), repeats=1)
    assert set(seconds) == {"0", "3"} and min(seconds.values()) >= 0
