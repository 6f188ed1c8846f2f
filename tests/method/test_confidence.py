"""decode.confidence: a chain ends before the first draft that the confidence head doubts; the text stays the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.decoding.generate import new_generator
from domino_jax.method.propose import NO_DRAFT, draft_base, propose
from domino_jax.method.settings import DecodeSettings, DraftSettings, SamplingParams
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import golden_models, make_generator, random_models, texts
from tests.helpers.models import load_golden

NAME = "markov_vanilla"


def prompts() -> list[list[int]]:
    return [row["prompt"] for row in load_golden(NAME).figures["generate"]]


@functools.lru_cache
def run(threshold: float):
    """(answers, drafts of all rounds) at one threshold, four prompts in two rows."""
    made = make_generator(
        golden_models(NAME),
        cache_length=128,
        max_new_tokens=40,
        batch_size=2,
        confidence=threshold,
        draft_sharpness=float("inf"),
    )
    found = made.generator.generate(made.models, prompts(), "draft")
    return found.answers, found.clock.drafts


def rounds(answers) -> int:
    return sum(len(answer.accept_lengths) for answer in answers)


def test_the_default_keeps_every_draft():
    answers, drafts = run(0.0)
    assert DraftSettings().confidence == 0.0
    assert drafts == 7 * rounds(answers)


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_a_threshold_shortens_the_drafts_and_never_changes_the_text(threshold):
    (answers, drafts), (whole, all_drafts) = run(threshold), run(0.0)
    assert texts(answers) == texts(whole)
    assert 0 < drafts / rounds(answers) < all_drafts / rounds(whole)
    assert sum(map(sum, (answer.accept_lengths for answer in answers))) == sum(
        map(sum, (answer.accept_lengths for answer in whole))
    )
    longest = max(max(answer.accept_lengths) for answer in answers)
    assert rounds(answers) >= rounds(whole) and longest > 1


def test_at_one_no_draft_is_kept_and_every_round_is_a_plain_step():
    answers, drafts = run(1.0)
    assert texts(answers) == texts(run(0.0)[0])
    assert drafts == 0 and {length for answer in answers for length in answer.accept_lengths} == {1}


def test_the_chain_ends_before_the_first_doubted_draft():
    models = golden_models(NAME)
    made = make_generator(models, cache_length=128, max_new_tokens=40, batch_size=4)
    state = made.start(prompts(), range(4))

    @functools.partial(jax.jit, static_argnums=2)
    def drafted(models, state, threshold):
        settings = DraftSettings(confidence=threshold)
        return propose(models, state, SamplingParams(), settings)[0], draft_base(models, state)[0]

    (whole, z), (cut, _) = drafted(models, state, 0.0), drafted(models, state, 0.6)
    before = jnp.concatenate([state.anchors[:, None], whole[:, :-1]], axis=1)
    chances = np.asarray(jax.nn.sigmoid(jax.jit(models.confidence)(z, before)))
    expected = []
    for row, chance in zip(whole.tolist(), chances, strict=True):
        sure = next((place for place, value in enumerate(chance) if value < 0.6), len(row))
        expected.append([*row[:sure], *[NO_DRAFT] * (len(row) - sure)])
    assert cut.tolist() == expected
    kept = [row.index(NO_DRAFT) if NO_DRAFT in row else len(row) for row in expected]
    assert len(set(kept)) > 1, "the rows should be cut at different places"


@pytest.mark.parametrize("choices", [{"head": "domino"}, {"head": "markov"}])
def test_a_threshold_without_a_confidence_head_is_refused(choices):
    settings = DecodeSettings(cache_length=64, max_new_tokens=16, drafting=DraftSettings(confidence=0.5))
    with pytest.raises(DominoError, match="decode.confidence is 0.5, but this drafter has no confidence head; set it"):
        new_generator(random_models(**choices), settings)
    new_generator(random_models(**choices), dataclasses.replace(settings, drafting=DraftSettings()))
