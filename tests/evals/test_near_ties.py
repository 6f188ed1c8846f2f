"""near_ties.py: which first divergence of two texts is a near tie."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.decoding.generate import Generation
from domino_jax.decoding.sampling import position_noise, request_keys
from domino_jax.decoding.settings import SamplingParams
from domino_jax.evals.near_ties import near_tie_limit
from tests.helpers.decoding_models import make_generator, random_models, random_prompts, texts, uncached

PROMPT = [5, 9, 2, 60, 7]
WARM = SamplingParams(1.0, top_k=5)


def answers_of(*texts_: list[int]) -> list[Generation]:
    return [Generation(text, [], "length") for text in texts_]


def judge(generator, one, two):
    return generator.divergences([PROMPT], answers_of(one), answers_of(two))


def with_logits(logits):
    """Makes generators whose target says `logits` after PROMPT: its head is made to measure."""
    models = random_models()
    hidden = np.asarray(models.run_target(jnp.array([PROMPT]))["hidden"][0, -1], np.float64)
    kernel = np.outer(hidden, logits) / (hidden @ hidden)
    params = {**models.target_params, "lm_head": {"kernel": jnp.asarray(kernel, jnp.float32)}}
    return functools.partial(make_generator, models.replace(target_params=params))


def ranked_logits(*best: float) -> np.ndarray:
    """Logits whose tokens 0, 1, … have the values `best`, all others 20 below."""
    logits = np.full(64, -20.0)
    logits[: len(best)] = best
    return logits


def totals(logits, seed):
    """log p + g of the choice after PROMPT, up to a constant."""
    return logits + np.asarray(position_noise(request_keys(seed, jnp.array([0])), jnp.array([[5]]), 64))[0, 0]


def seed_that_prefers(token, *, over, logits):
    """The first seed whose noise lifts `token` well above the tokens `over`."""
    return next(s for s in range(1000) if totals(logits, s)[token] > totals(logits, s)[over].max() + 0.01)


def runner_up(logits, seed, tokens):
    return max(tokens, key=lambda token: totals(logits, seed)[token])


def test_equal_texts_diverge_nowhere():
    assert judge(make_generator(random_models()), [1, 2, 3], [1, 2, 3]) == []


def test_a_planted_wrong_token_is_a_violation_with_its_place_and_margin():
    generator = make_generator(random_models())
    logits = uncached(generator.models, [[*PROMPT, 30]])[0, -1]
    best, second = (int(token) for token in np.argsort(logits)[::-1][:2])
    [found] = judge(generator, [30, best, 4], [30, second, 4])
    assert (found.prompt, found.position, found.near_tie) == (0, 1, False)
    assert found.margin == pytest.approx(logits[best] - logits[second], abs=1e-4)


def test_a_planted_near_tie_is_recognised_and_a_gap_just_above_it_is_not():
    for gap, near in [(5e-5, True), (2e-4, False)]:
        [found] = judge(with_logits(ranked_logits(3.0, 3.0 - gap))(), [0], [1])
        assert (found.near_tie, found.margin) == (near, pytest.approx(gap, abs=2e-5))


def test_two_close_tokens_far_below_the_best_are_a_violation():
    [found] = judge(with_logits(ranked_logits(3.0, 1.0, 1.0))(), [1], [2])
    assert not found.near_tie


def test_two_close_sampled_tokens_far_below_the_best_are_a_violation():
    """Both values of log p + g are 2 below the best: neither text is what the target chose."""
    noise = np.asarray(position_noise(request_keys(0, jnp.array([0])), jnp.array([[5]]), 64))[0, 0]
    logits = ranked_logits(3.0, 1.0, 1.0)
    logits[:3] -= noise[:3]
    [found] = judge(with_logits(logits)(sampling=SamplingParams(1.0)), [1], [2])
    assert not found.near_tie


def test_a_sampled_near_tie_counts_the_noise():
    noise = np.asarray(position_noise(request_keys(0, jnp.array([0])), jnp.array([[5]]), 64))[0, 0]
    for gap, near in [(5e-5, True), (2e-3, False)]:
        logits = ranked_logits(3.0, 3.0 - gap)
        logits[:2] -= noise[:2]
        [found] = judge(with_logits(logits)(sampling=SamplingParams(1.0)), [0], [1])
        assert found.near_tie == near


@pytest.mark.parametrize(
    ("logits", "near"),
    [
        (ranked_logits(3.0, 2.0, 1.0, 0.99999, -5.0), True),  # the third and fourth may change places at top_k 3
        (ranked_logits(3.0, 2.0, 1.0, 0.0, -5.0), False),  # the third is the last one inside, and safely so
    ],
)
def test_a_token_is_near_the_top_k_edge_only_if_another_could_take_its_place(logits, near):
    seed = seed_that_prefers(2, over=[0, 1], logits=logits)
    generator = with_logits(logits)(sampling=SamplingParams(1.0, top_k=3), seed=seed)
    [found] = judge(generator, [2], [runner_up(logits, seed, [0, 1])])
    assert found.near_tie == near


@pytest.mark.parametrize(("mass", "near"), [(0.9, True), (0.9001, False)])
def test_a_token_within_1e_5_of_mass_of_the_top_p_edge_is_a_near_tie(mass, near):
    """Tokens 0 and 1 hold 90 % between them, so token 2 is in at a top-p of 0.9 and a hair, and out just below."""
    logits = np.full(64, -60.0)
    logits[:3] = np.log([0.6, 0.3, 0.1])
    seed = seed_that_prefers(2, over=[0, 1], logits=logits)
    generator = with_logits(logits)(sampling=SamplingParams(1.0, top_p=mass), seed=seed)
    [found] = judge(generator, [2], [runner_up(logits, seed, [0, 1])])
    assert found.near_tie == near


def test_an_edge_excuses_no_token_that_would_not_be_chosen_inside_it():
    """Token 2 may leave top-3, but with or without it the choice is another: a text with it is wrong."""
    logits = ranked_logits(3.0, 2.0, 1.0, 0.99999)
    seed = seed_that_prefers(0, over=[1, 2, 3], logits=logits)
    [found] = judge(with_logits(logits)(sampling=SamplingParams(1.0, top_k=3), seed=seed), [0], [2])
    assert not found.near_tie


def test_a_text_that_stops_short_is_a_violation():
    [found] = judge(make_generator(random_models()), [1, 2, 3], [1, 2])
    assert (found.position, found.near_tie) == (2, False)


def test_every_prompt_is_judged_with_its_own_noise():
    generator = make_generator(random_models(), sampling=WARM)
    prompts, requests = random_prompts(3, shortest=4), [7, 0, 3]
    right = texts(generator.generate(prompts, "autoregressive", requests))
    wrong = [text[:3] + [(text[3] + 1) % 64] + text[4:] for text in right]
    found = generator.divergences(prompts, answers_of(*right), answers_of(*wrong), requests)
    assert [(entry.prompt, entry.position, entry.near_tie) for entry in found] == [(i, 3, False) for i in range(3)]


@pytest.mark.parametrize(("best", "limit"), [(20.0, 0.25), (3.0, 0.03125), (-0.75, 0.015625)])
def test_in_bfloat16_two_units_in_the_last_place_are_a_near_tie(best, limit):
    """Of the largest in question: of -0.75 and -1.75 that is the second, which a high temperature may choose."""
    logits = [best, best - 1.0]
    assert near_tie_limit(jnp.bfloat16, logits, SamplingParams()) == limit
    assert near_tie_limit(jnp.bfloat16, logits, SamplingParams(0.5)) == 2 * limit


def test_in_float32_the_limit_is_one_ten_thousandth_whatever_the_logits():
    assert near_tie_limit(jnp.float32, [1e4, 0.0], SamplingParams()) == 1e-4
