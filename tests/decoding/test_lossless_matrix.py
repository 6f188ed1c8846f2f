"""Every drafter in every loop: the text is the target's, in float32, greedy or sampled.

The matrix is made from the lists of heads and modes, so a new one is in it or fails here.
"""

import functools

import pytest

from domino_jax.method.names import HEADS, MARKOV, MARKOV_KINDS
from domino_jax.method.settings import BASELINE, DRAFT, MODES, SamplingParams, TreeSettings
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import (
    HEAD_SIZES,
    check_lossless,
    make_generator,
    random_models,
    random_prompts,
    texts,
)

SAMPLED = SamplingParams(0.8, top_k=20, top_p=0.9)
TREE = TreeSettings(nodes=9, lanes=4, candidates=8)
# The first of a head's kinds is that of HEAD_SIZES.
KINDS = {head: ({},) for head in HEADS} | {
    MARKOV: tuple({"markov_head_type": kind} for kind in reversed(MARKOV_KINDS)),
}
CASES = [
    pytest.param(head, place, id="-".join([head, *choices.values()]), marks=[pytest.mark.slow] * bool(place))
    for head in HEADS
    for place, choices in enumerate(KINDS[head])
]
UNSHIFTED = ("none", "dflash2")  # as their public files are


@functools.lru_cache
def generator(head: str, place: int, batch_size: int = 3):
    choices = {"head": head, **KINDS[head][place]}
    if head in UNSHIFTED:
        choices["shift_label"] = False
    # The noise is shared, so that drafts of random weights are accepted now and then.
    return make_generator(random_models(4, **choices), batch_size=batch_size, sampling=SAMPLED, tree=TREE)


def modes_of(made) -> tuple[str, ...]:
    """The modes that this drafter has, plain decoding first."""
    modes = []
    for mode in MODES:
        try:
            made.check_mode(mode)
        except DominoError:
            continue
        modes.append(mode)
    assert modes[0] == BASELINE and DRAFT in modes
    return tuple(modes)


@functools.lru_cache
def first_turn(head: str, place: int):
    """Five prompts over three rows, so that rows are admitted and the batch shrinks: the answers of every mode."""
    made = generator(head, place)
    return check_lossless(made, PROMPTS, modes_of(made))


PROMPTS = random_prompts(5)
SECOND = [[7, 3], [1], [9, 9, 2], [4], [5, 6]]  # another second prompt for every row


@pytest.mark.parametrize(("head", "place"), CASES)
def test_no_mode_changes_a_token_and_plain_decoding_repeats_itself(head, place):
    answers = first_turn(head, place)
    again = generator(head, place).generate(PROMPTS, BASELINE)
    assert texts(again) == texts(answers[BASELINE])  # the control: what is compared with does not waver
    assert any(max(answer.accept_lengths) > 1 for answer in answers[DRAFT])


@pytest.mark.parametrize(("head", "place"), CASES)
def test_no_mode_changes_a_token_of_a_second_turn(head, place):
    made, first = generator(head, place), texts(first_turn(head, place)[BASELINE])
    prompts = [[*one, *answer, *more] for one, answer, more in zip(PROMPTS, first, SECOND, strict=True)]
    check_lossless(made, prompts, modes_of(made))


@pytest.mark.parametrize(("head", "place"), CASES)
def test_a_streamed_answer_alone_is_that_of_the_batch_round_by_round(head, place):
    """So no row reads another row's context: its drafts are accepted as in the batch."""
    made, whole = generator(head, place), first_turn(head, place)[DRAFT]
    for row in (0, 3):
        pieces = list(made.stream(PROMPTS[row], DRAFT, chunk_rounds=3, request=row))
        assert sum((piece.token_ids for piece in pieces), []) == whole[row].token_ids
        assert sum((piece.accept_lengths for piece in pieces), []) == whole[row].accept_lengths


def test_every_head_has_a_case_and_every_mode_a_head():
    assert set(HEAD_SIZES) == set(HEADS) == set(KINDS)
    assert {mode for head in HEADS for mode in modes_of(generator(head, 0))} == set(MODES)
