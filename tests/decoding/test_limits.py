"""limits.py: prompt and answer stay within the positions that the models know, and the refusal names both numbers."""

import dataclasses

import pytest

from domino_jax.decoding.conversations import Answerer
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.decoding_models import make_generator, random_models


def with_positions(target: int, drafter: int):
    """Models whose configs allow these numbers of positions."""

    def clone(module, positions: int):
        return module.clone(config=dataclasses.replace(module.config, max_position_embeddings=positions))

    models = random_models()
    return models.replace(target=clone(models.target, target), drafter=clone(models.drafter, drafter))


@pytest.mark.long
@pytest.mark.parametrize(("target", "drafter", "model"), [(20, 40, "target"), (40, 20, "drafter")])
def test_prompt_and_answer_stay_within_the_smaller_max_position_embeddings(target, drafter, model):
    """8 + 12 tokens fill 20 positions; the block after them may be beyond."""
    made = make_generator(with_positions(target, drafter), max_new_tokens=12)
    with pytest.raises(DataError, match=f"prompt 1 has 9 tokens and asks for 12 more, but the {model}'s .* is 20;"):
        made.generate([[7] * 8, [7] * 9], "domino")
    [answer] = made.generate([[7] * 8], "domino")
    assert len(answer.token_ids) == 12


def test_an_answer_length_that_no_prompt_leaves_room_for_is_a_mistake_of_the_recipe():
    with pytest.raises(DominoError, match="max_new_tokens is 20, but the target's max_position_embeddings is 20") as it:
        make_generator(with_positions(20, 40), max_new_tokens=20)
    assert it.value.exit_code == 2


def test_regenerated_prompts_past_a_drafters_positions_are_answered_without_it():
    answerer = Answerer(with_positions(100, 50), DecodeSettings(max_new_tokens=12, batch_size=2))
    assert answerer.generator(38).drafter is not None
    assert answerer.generator(39).drafter is None
    assert answerer.fits(Prompt("p", [7] * 60, 0))
