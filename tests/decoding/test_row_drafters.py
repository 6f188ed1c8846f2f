"""What EAGLE-3 and Medusa keep of the text: the same in chunks, in growing and shrinking caches, at every width."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.decoding.requests import Request
from domino_jax.method import loop
from domino_jax.method.names import ROW_DRAFTERS
from domino_jax.method.propose import propose
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from domino_jax.models.cache import slots_of
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import (
    check_lossless,
    golden_models,
    make_generator,
    planted_drafts,
    random_models,
    random_prompts,
    texts,
)
from tests.helpers.models import load_golden

WARM = SamplingParams(1.0)
LONG = [*random_prompts(1, 150, 150), *random_prompts(1, 64, 64), *random_prompts(1, 7, 7)]


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_a_prefill_in_chunks_leaves_the_drafts_and_the_answers_of_one_pass(monkeypatch, head):
    """Prompts of 150, 64 and 7 tokens in chunks of 64; the limit of 200 is no multiple, so the last chunk overlaps the
    one before it, and for two of the rows it holds no text."""
    models, found = random_models(head=head), []
    for tokens in (2**20, 1):
        monkeypatch.setattr(loop, "PREFILL_TOKENS", tokens)
        made = make_generator(models, cache_slots=200, batch_size=3, sampling=WARM)
        state = made.start(LONG, range(3))
        drafts = jax.jit(lambda models, state: propose(models, state, SamplingParams(), DraftSettings())[0])
        last = state.draft_cache[-1]
        found.append((np.asarray(last), np.asarray(drafts(models, state)), made.generate(LONG, "draft")))
    (whole, drafts, answers), (chunked, others, again) = found
    np.testing.assert_allclose(chunked, whole, atol=1e-5)
    assert (drafts == others).all() and answers == again


LIMITS = (40, 7, 12, 3, 60, 1)
PROMPTS = [*random_prompts(2), *random_prompts(1, 14, 14), *random_prompts(1, 17, 17), *random_prompts(2, 30, 40)]
REQUESTS = [Request(index, max_new_tokens=limit) for index, limit in enumerate(LIMITS)]


SHAPE = {"cache_slots": 128, "max_new_tokens": 60, "sampling": WARM}


@functools.lru_cache
def whole(head: str):
    """Answers of three rows at a time, with caches that always have all slots."""
    made = make_generator(random_models(head=head), **SHAPE, smallest_cache=128, batch_size=3)
    return made.generate(PROMPTS, "draft", REQUESTS)


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_caches_that_grow_and_shrink_change_no_answer_and_no_round(head):
    """Four rows that shrink to one: rows of different length grow, end and are used again."""
    made = make_generator(random_models(head=head), **SHAPE, smallest_cache=32, batch_size=4)
    assert made.generate(PROMPTS, "draft", REQUESTS) == whole(head)
    assert len({key[2] for key in made.compiled if key[0] == "draft"}) > 1
    assert any(key[0] == "shrink" for key in made.compiled)


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_every_row_of_a_ragged_batch_drafts_as_it_does_alone(head):
    alone = make_generator(random_models(head=head), **SHAPE, smallest_cache=128)
    for place in (0, 4):
        [answer] = alone.generate([PROMPTS[place]], "draft", [REQUESTS[place]])
        assert answer == whole(head)[place]


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_every_width_of_a_draft_gives_the_text_and_narrow_ones_no_longer_rounds(head):
    """Few drafts, all of Medusa's heads, and more of EAGLE-3 than its usual chain."""
    models, prompts = golden_models(head), [row["prompt"] for row in load_golden(head).figures["generate"]]
    expected, longest = [row["output"][:40] for row in load_golden(head).figures["generate"]], []
    for drafts in (1, 5) if head == "medusa" else (2, 9):
        made = make_generator(models, cache_slots=128, max_new_tokens=40, batch_size=4, num_drafts=drafts)
        answers = made.generate(prompts, "draft")
        assert texts(answers) == expected
        longest.append(max(max(answer.accept_lengths) for answer in answers))
        assert longest[-1] <= drafts + 1
    assert longest == sorted(longest) and longest[-1] > 2


def test_a_chain_after_plain_rounds_is_that_of_a_fresh_start():
    """A round without drafts writes the row before the anchor all the same: its token was not known to the prefill."""
    models, prompts = golden_models("eagle3"), [load_golden("eagle3").figures["generate"][1]["prompt"]]
    made = make_generator(models, cache_slots=128, batch_size=1, widths=((1, 0), (2, 6)), max_new_tokens=16)
    state = made.advance(made.start(prompts, [0]), "draft", 4)
    text = [*prompts[0], *np.asarray(state.tokens[0, : int(state.counts[0])]).tolist()]
    fresh = make_generator(models, cache_slots=128, batch_size=1, max_new_tokens=16).start([text[:-1]], [0])
    drafts = jax.jit(lambda state: propose(models, state, SamplingParams(), DraftSettings(num_drafts=6))[0])
    assert int(fresh.anchors[0]) == text[-1] and int(state.lengths[0]) == len(text) - 1
    assert drafts(state).tolist() == drafts(fresh).tolist()
    length = len(text) - 2  # the row before the anchor is written by the next round
    for kept, read in zip(state.draft_cache[0], fresh.draft_cache[0], strict=True):
        np.testing.assert_allclose(kept[0, :, :length], read[0, :, :length], atol=1e-5)


def test_drafted_rows_are_replaced_by_rows_with_the_features_of_the_text():
    """After rounds of rejected and accepted drafts the cache is that of a prefill of the same text."""
    models, prompts = golden_models("eagle3"), [load_golden("eagle3").figures["generate"][2]["prompt"]]
    made = make_generator(models, cache_slots=128, batch_size=1, num_drafts=6, max_new_tokens=32)
    state = made.advance(made.start(prompts, [0]), "draft", 5)
    accepted = np.asarray(state.accepts[0, :5])
    assert accepted.min() < 7 and accepted.max() > 1
    text = [*prompts[0], *np.asarray(state.tokens[0, : int(state.counts[0])]).tolist()]
    fresh = made.start([text[:-1]], [0])
    np.testing.assert_allclose(state.draft_cache[1], fresh.draft_cache[1], atol=1e-4)
    for kept, read in zip(state.draft_cache[0], fresh.draft_cache[0], strict=True):
        np.testing.assert_allclose(kept[0, :, : len(text) - 2], read[0, :, : len(text) - 2], atol=1e-4)


@pytest.mark.parametrize("head", ROW_DRAFTERS)
def test_a_drafter_that_is_always_right_or_always_wrong_sets_the_pace_and_not_the_text(head):
    models, prompts = random_models(head=head), random_prompts(4)
    made = make_generator(models, max_new_tokens=21, batch_size=4)
    expected = texts(made.generate(prompts, "autoregressive"))
    drafts = np.array(expected)
    drafts[2:] = (drafts[2:] + 1) % 64
    with planted_drafts(drafts):
        answers = made.generate(prompts, "draft")
    each = models.drafter.config.num_drafts + 1
    right = [each] * (20 // each) + ([20 % each] if 20 % each else [])
    assert texts(answers) == expected
    assert [answer.accept_lengths for answer in answers] == [right] * 2 + [[1] * 20] * 2


def test_noise_that_is_shared_makes_sampled_drafts_agree_more_often():
    """At temperature 1 drafts of the trained chain with the target's noise beat greedy ones, and both give its text."""
    models, prompts = golden_models("eagle3"), [row["prompt"] for row in load_golden("eagle3").figures["generate"]]
    tau, answers = {}, {}
    for scale in (1.0, float("inf")):
        made = make_generator(
            models, cache_slots=128, max_new_tokens=48, batch_size=4, num_drafts=4, sampling=WARM, scale=scale
        )
        answers[scale] = made.generate(prompts, "draft")
        rounds = [length for answer in answers[scale] for length in answer.accept_lengths]
        tau[scale] = sum(rounds) / len(rounds)
    assert texts(answers[1.0]) == texts(answers[float("inf")])
    assert min(tau.values()) > 1.2 and tau[1.0] > tau[float("inf")] - 0.3


def test_medusas_tree_of_products_gives_the_text_in_no_more_rounds_than_the_chain():
    models, prompts = golden_models("medusa"), [row["prompt"] for row in load_golden("medusa").figures["generate"]]
    tree = TreeSettings(nodes=24, lanes=6, candidates=8, beta=0.0)
    made = make_generator(models, cache_slots=128, max_new_tokens=48, batch_size=4, tree=tree)
    runs = check_lossless(made, prompts, ("autoregressive", "draft", "tree"))
    chain, tree = (sum(len(answer.accept_lengths) for answer in runs[mode]) for mode in ("draft", "tree"))
    assert tree < chain


@pytest.mark.parametrize(
    ("head", "mode", "message"),
    [
        ("medusa", "backbone", "medusa has none; use mode 'draft'"),
        ("eagle3", "backbone", "eagle3 has none; use mode 'draft'"),
        ("eagle3", "tree", "eagle3 drafts chains alone; use mode 'draft'"),
        ("medusa", "domino", "this one is medusa; use mode 'draft'"),
    ],
)
def test_a_mode_that_needs_another_drafter_is_refused(head, mode, message):
    tree = TreeSettings(nodes=4, lanes=2, candidates=4)
    with pytest.raises(DominoError, match=message):
        make_generator(random_models(head=head), tree=tree).generate([[1]], mode)


@pytest.mark.parametrize(("head", "drafts", "message"), [("medusa", 5, "gives 4 drafts"), ("eagle3", 65, "at most 64")])
def test_more_drafts_than_the_drafter_makes_are_refused(head, drafts, message):
    with pytest.raises(DominoError, match=f"num_drafts is {drafts}, but .*{message}"):
        make_generator(random_models(head=head), num_drafts=drafts)


def test_the_last_state_of_medusa_is_that_before_the_anchor():
    """A verified block keeps the state of its last accepted row, not of its last row."""
    models = golden_models("medusa")
    prompts = [row["prompt"] for row in load_golden("medusa").figures["generate"]]
    made = make_generator(models, cache_slots=128, batch_size=4, max_new_tokens=32)
    state = made.advance(made.start(prompts, range(4)), "draft", 3)
    for row, prompt in enumerate(prompts):
        text = [*prompt, *np.asarray(state.tokens[row, : int(state.counts[row])]).tolist()]
        hidden = models.run_target(jnp.asarray([text[:-1]], jnp.int32))["hidden"][0, -1]
        np.testing.assert_allclose(state.draft_cache[0][row], hidden, atol=1e-4)


def test_the_caches_of_eagle3_have_one_layer_of_the_targets_slots():
    state = make_generator(random_models(head="eagle3"), batch_size=2).start([[1, 2], [3]], range(2))
    assert slots_of(state.draft_cache) == slots_of(state.target_cache)
    assert [leaf.shape for leaf in jax.tree.leaves(state.draft_cache)] == [(2, 2, 64, 16)] * 2 + [(2, 32)]
