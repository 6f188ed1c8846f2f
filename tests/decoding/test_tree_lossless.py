"""A tree changes the speed and never the text; it helps; and a rule that is not lossless is caught."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from domino_jax.decoding.requests import Request
from domino_jax.method import rounds
from domino_jax.method.pair import Models
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from tests.helpers.decoding_models import (
    DRAFTERS,
    chi_square,
    golden_models,
    make_generator,
    random_models,
    random_prompts,
    texts,
)
from tests.helpers.models import GOLDEN_SETS, load_golden
from tests.method.test_sampling import sequence_law

GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.8, top_k=20, top_p=0.9)
TREE = TreeSettings(nodes=13, lanes=6, candidates=16, beta=-0.1)


def check_lossless(made, prompts, requests=None, modes=("tree",)):
    """Holds modes against plain decoding; a first divergence is let pass only as a shown near tie."""
    plain = made.generate(prompts, "autoregressive", requests)
    answers = [made.generate(prompts, mode, requests) for mode in modes]
    for mode, some in zip(modes, answers, strict=True):
        wrong = [entry for entry in made.divergences(prompts, plain, some) if not entry.near_tie]
        assert not wrong, f"not lossless: {mode} {wrong}"
        assert all(1 + sum(answer.accept_lengths) == len(answer.token_ids) for answer in some)
    return answers


def tau(answers) -> float:
    return float(np.mean([emitted for answer in answers for emitted in answer.accept_lengths]))


@functools.lru_cache
def golden_run(name: str, sampling: SamplingParams):
    """(chain, tree) of a trained pair; more prompts than rows, so that rows are refilled as they finish."""
    prompts = [row["prompt"] for row in load_golden(name).figures["generate"]]
    prompts += [prompt[:length] for prompt in prompts for length in (1, 9)]
    vocab = golden_models(name).target.config.vocab_size
    tree = TreeSettings(nodes=16, lanes=6, candidates=min(vocab, 32), beta=-0.1)
    shape = {"cache_slots": 128, "max_new_tokens": 48, "batch_size": 4, "sampling": sampling, "scale": math.inf}
    made = make_generator(golden_models(name), tree=tree, **shape)
    return check_lossless(made, prompts, modes=("domino", "tree"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sampling"), list(zip(GOLDEN_SETS, (GREEDY, SAMPLED), strict=True)))
def test_a_tree_of_a_trained_drafter_changes_no_token_and_helps(name, sampling):
    chain, tree = golden_run(name, sampling)
    assert texts(chain) and tau(tree) > 1.1 * tau(chain)


@pytest.mark.slow
def test_a_tree_coupled_with_the_targets_noise_changes_no_token():
    tree = dataclasses.replace(TREE, draft_scale=1.0)
    check_lossless(make_generator(random_models(4), batch_size=8, sampling=SAMPLED, tree=tree), random_prompts(8))


@pytest.mark.slow(minutes=0.2)
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize(("batch", "sampling"), [(1, GREEDY), (8, SAMPLED)], ids=["alone, greedy", "sampled"])
def test_the_full_grid_of_random_pairs_changes_no_token(shift_label, prefix, batch, sampling):
    models = random_models(4, shift_label=shift_label, pure_draft_prefix_len=prefix)
    made = make_generator(models, batch_size=batch, sampling=sampling, max_new_tokens=32, tree=TREE)
    check_lossless(made, random_prompts(32))


@pytest.mark.slow
def test_a_dflash_drafter_gets_a_tree_that_changes_no_token():
    models = random_models(4, head="none", shift_label=False)
    made = make_generator(models, batch_size=4, sampling=SamplingParams(0.7, min_p=0.05), tree=TREE)
    check_lossless(made, random_prompts(8), modes=("backbone", "tree"))


# ---------------------------------------------------------------------------- one generator, for what follows


@functools.lru_cache
def greedy_made():
    return make_generator(random_models(4), batch_size=3, tree=TREE, stop_ids=(7,))


def test_rows_of_a_batch_and_their_refilling_change_no_token():
    """Seven prompts over three rows; each row has its own accepted path."""
    check_lossless(greedy_made(), random_prompts(7))


@pytest.mark.slow
def test_requests_of_different_sampling_share_a_tree_round():
    requests = [Request(3), Request(4, seed=9, sampling=SAMPLED), Request(5, max_new_tokens=4)]
    made, prompts = greedy_made(), random_prompts(3)
    plain = made.generate(prompts, "autoregressive", requests)
    assert texts(made.generate(prompts, "tree", requests)) == texts(plain)
    assert len(plain[2].token_ids) <= 4


def test_a_stream_of_a_tree_is_its_text():
    made, [prompt] = greedy_made(), random_prompts(1)
    pieces = list(made.stream(prompt, "tree", chunk_rounds=2))
    [whole] = made.generate([prompt], "tree")
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert pieces[-1].finish_reason == whole.finish_reason


# ------------------------------------------------------------------- every kind of drafter, a round at a time

SMALL = TreeSettings(nodes=9, lanes=4, candidates=8, beta=-0.1, draft_scale=1.0)
# Greedy and sampled in turn; of eight tokens even an untrained drafter guesses several in a row.
MIXED = [Request(number, sampling=SamplingParams(0.8) if number % 2 else None) for number in range(8)]


@functools.cache
def started():
    """One state for all kinds: where labels stand and what is corrected changes no weight and no cache."""
    return make_generator(random_models(vocab=8), batch_size=8).start(random_prompts(8, vocab=8), MIXED)


@functools.cache
def plain_texts() -> list[list[int]]:
    models = random_models(vocab=8)
    alone = make_generator(Models(models.target, models.target_params), batch_size=8)
    return texts(alone.generate(random_prompts(8, vocab=8), "autoregressive", MIXED))


def text_in_rounds(kind: str):
    """(texts, tokens of each round) of `started()` with this kind of drafter."""
    models, state = random_models(vocab=8, **DRAFTERS[kind]), started()

    def one_round(models, state):
        settings = DraftSettings(tree=SMALL)
        return rounds.speculative_round(models, state, jnp.array([-1]), GREEDY, settings)

    compiled = jax.jit(one_round).lower(models, state).compile()
    while not state.done.all():
        state = compiled(models, state)
    return state.tokens.tolist(), np.asarray(state.accepts)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_and_sampled_texts_are_plain_ones_with_every_kind_of_drafter(kind):
    found, emitted = text_in_rounds(kind)
    assert found == plain_texts()
    assert emitted.max() >= 3 and emitted[emitted > 0].mean() > 1.5


def test_standing_one_node_too_deep_is_caught(monkeypatch):
    """The control of this file: the first child of the last accepted node stands too."""
    accept = rounds.accept_tree

    def lenient(tokens, chosen, depths, parents, ancestors, deepest):
        accepted, path = accept(tokens, chosen, depths, parents, ancestors, deepest)
        last = jnp.take_along_axis(path, accepted[:, None], axis=1)
        child = jnp.argmax((parents == last) & (depths > 0), axis=1)
        more = jnp.where(child > 0, 1, 0)
        return accepted + more, path.at[jnp.arange(len(child)), accepted + more].set(jnp.maximum(child, 0))

    monkeypatch.setattr(rounds, "accept_tree", lenient)
    found, _ = text_in_rounds("unshifted, prefix 0")
    wrong = [one != plain for one, plain in zip(found, plain_texts(), strict=True)]
    assert any(wrong[::2]) and any(wrong[1::2])  # greedy and sampled


# ------------------------------------------------------------------------------------------------- the joint law

LAW, PROMPT = SamplingParams(1.0), [3, 1, 4]
LIMIT = scipy.stats.chi2.isf(1e-4, 63)


def counted(count: int, kind: str = "shifted, prefix 1", draft_scale: float | None = 1.0) -> np.ndarray:
    """How often each pair of second and third new tokens came, [8, 8]; a tree drafts both in its first round."""
    tree = TreeSettings(nodes=6, lanes=4, candidates=8, draft_scale=draft_scale)
    shape = {"cache_slots": 16, "max_new_tokens": 3, "batch_size": 2_000, "sampling": LAW}
    made = make_generator(random_models(vocab=8, **DRAFTERS[kind]), tree=tree, **shape)
    answers = []  # a batch at a time: nothing waits, so that no row is refilled on its own
    for start in range(0, count, 2_000):
        answers += made.generate([PROMPT] * 2_000, "tree", range(start, start + 2_000))
    assert {tuple(answer.accept_lengths) for answer in answers} == {(2,), (1, 1)}
    counts = np.zeros((8, 8))
    np.add.at(counts, tuple(np.array(texts(answers)).T[1:]), 1)
    return counts


@functools.cache
def joint_law() -> np.ndarray:
    """The target's own: the same with every kind of drafter."""
    return sequence_law(random_models(vocab=8), PROMPT, LAW)


@pytest.mark.parametrize(
    ("kind", "count", "draft_scale"),
    [
        ("unshifted, prefix 0", 6_000, 1.0),
        pytest.param("shifted, prefix 1", 20_000, None, marks=pytest.mark.slow),
        *(pytest.param(kind, 20_000, 1.0, marks=pytest.mark.slow) for kind in DRAFTERS),
    ],
)
def test_two_tokens_of_a_tree_follow_their_joint_law(kind, count, draft_scale):
    law, counts = joint_law(), counted(count, kind, draft_scale)
    assert chi_square(counts, law) < LIMIT
    # Two tokens with the right laws but drawn independently must not pass.
    assert chi_square(np.outer(counts.sum(1), counts.sum(0)) / counts.sum(), law) > LIMIT


@pytest.mark.slow
def test_noise_that_ignores_the_depth_fails_the_joint_law(monkeypatch):
    """A wrong rule: all nodes of a round choose with the root's noise."""
    choose = rounds.choose

    def careless(logits, keys, positions, params, depths):
        return choose(logits, keys, positions, params, depths=jnp.zeros_like(depths))

    monkeypatch.setattr(rounds, "choose", careless)
    law = joint_law()
    assert chi_square(counted(4_000, draft_scale=None), law) > LIMIT


def test_the_law_is_one_over_all_pairs():
    law = joint_law()
    assert law.shape == (8, 8) and abs(law.sum() - 1) < 1e-6
    assert all(law[pair] > 0 for pair in itertools.product(range(8), repeat=2))
