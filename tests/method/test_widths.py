"""The number of drafts by the rows of a batch: the same texts, plain steps that keep up the drafter's context."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from domino_jax.decoding.requests import Request
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import SmallGenerator, make_generator, random_models, random_prompts, texts

WARM = SamplingParams(1.0)
PROMPTS = random_prompts(11)
LIMITS = (3, 30, 4, 1, 5, 40, 2, 4, 6, 5, 7)
REQUESTS = [Request(index, max_new_tokens=limit) for index, limit in enumerate(LIMITS)]
SAMPLINGS = (None, SamplingParams(), SamplingParams(1.3, top_p=0.8))
MIXED = [dataclasses.replace(one, sampling=SAMPLINGS[one.noise % 3]) for one in REQUESTS]


@functools.lru_cache
def generator(widths: tuple[tuple[int, int], ...] = (), batch: int = 8, **choices) -> SmallGenerator:
    shape = {"cache_slots": 64, "max_new_tokens": 40, "batch_size": batch}
    return make_generator(random_models(), **shape, sampling=WARM, widths=widths, **choices)


def test_a_batch_takes_the_width_of_the_next_larger_measured_one():
    drafting = DraftSettings(num_drafts=3, widths=((1, 8), (4, 2), (8, 0)))
    assert [drafting.at(rows) for rows in (1, 2, 8, 99)] == [DraftSettings(num_drafts=n) for n in (8, 2, 0, 0)]
    assert drafting.width(random_models().drafter.config) == 8
    tree = TreeSettings(nodes=4, lanes=2)
    assert dataclasses.replace(drafting, tree=tree).at(8) == DraftSettings(num_drafts=3, tree=tree)
    assert DraftSettings().at(8) == DraftSettings()


@pytest.mark.parametrize("requests", [REQUESTS, MIXED], ids=["alike", "mixed"])
@pytest.mark.parametrize("mode", ["draft", "backbone"])
def test_texts_are_the_same_with_any_width_by_rows(mode, requests):
    """Eight rows take plain steps. Two of them are left, and draft from a context that those steps extended."""
    answers = generator(((2, 4), (8, 0))).generate(PROMPTS, mode, requests)
    assert texts(answers) == texts(generator().generate(PROMPTS, mode, requests))
    for answer, limit in zip(answers, LIMITS, strict=True):
        assert 1 + sum(answer.accept_lengths) == len(answer.token_ids) == limit
    short, long = ([answers[index].accept_lengths for index in places] for places in ((0, 2, 4), (1, 5)))
    assert set(sum(short, [])) == {1}
    assert all(lengths[0] == 1 for lengths in long) and max(map(max, long)) > 1


def test_a_plain_step_between_drafts_extends_the_context_as_a_prefill_does():
    made = generator(((1, 0), (8, 4)))
    state = made.start([PROMPTS[0]], [0], rows=1)
    state = made.advance(state, "draft", 6)
    tokens = jax.device_get(state.tokens)[0, :7].tolist()
    assert (int(state.lengths[0]), int(state.rounds[0])) == (len(PROMPTS[0]) + 6, 6)
    fresh = made.start([[*PROMPTS[0], *tokens[:-1]]], [0], rows=1)
    length = int(fresh.lengths[0])
    for kept, read in zip(jax.tree.leaves(state.draft_cache), jax.tree.leaves(fresh.draft_cache), strict=True):
        np.testing.assert_allclose(kept[:, :, :length], read[:, :, :length], atol=1e-5)


def test_a_draft_that_is_plain_in_any_batch_has_no_context():
    made = generator(((8, 0),))
    answers = made.generate(PROMPTS[:2], "draft", REQUESTS[:2])
    assert {key[4] for key in made.compiled if key[0] == "prefill"} == {True}  # as plain decoding starts
    assert texts(answers) == texts(generator().generate(PROMPTS[:2], "autoregressive", REQUESTS[:2]))
    assert set(answers[1].accept_lengths) == {1}


def test_verified_drafts_are_counted_at_the_width_of_their_batch():
    """Rounds of eight rows verify one draft, those of two rows four."""
    made = generator(((2, 4), (8, 1)))
    clock = made.generator.generate(made.models, PROMPTS[:8], "draft", REQUESTS[:8])
    rounds = sum(len(answer.accept_lengths) for answer in clock.answers)
    assert rounds < clock.clock.drafts < 4 * rounds
    narrow = generator(((8, 1),))
    clock = narrow.generator.generate(narrow.models, PROMPTS, "draft", REQUESTS)
    assert clock.clock.drafts == sum(len(answer.accept_lengths) for answer in clock.answers)
    assert made.generator.generate(made.models, PROMPTS[:2], "autoregressive", REQUESTS[:2]).clock.drafts == 0


def test_a_width_that_the_block_does_not_have_is_refused():
    with pytest.raises(DominoError, match="num_drafts is 5, but a block of 4 slots gives 4 drafts"):
        generator(((2, 5), (8, 1)))
