"""near_ties.py: which first divergence of two texts is a near tie."""

import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.decoding.generate import Generation
from domino_jax.decoding.requests import Request
from domino_jax.evals.near_ties import NEAR_TIE, choice_margin, near_tie_limit
from domino_jax.method.sampling import position_noise, request_keys
from domino_jax.method.settings import SamplingParams
from tests.helpers.decoding_models import make_generator, random_models, random_prompts, texts, uncached

PROMPT = [5, 9, 2, 60, 7]
WARM, TOP_3 = SamplingParams(1.0), SamplingParams(1.0, top_k=3)


def answers_of(*texts_: list[int]) -> list[Generation]:
    return [Generation(text, [], "length") for text in texts_]


def judge(generator, one, two):
    return generator.divergences([PROMPT], answers_of(one), answers_of(two))


def ranked(*best: float) -> np.ndarray:
    """Logits whose tokens 0, 1, … have the values `best`, all others 20 below."""
    logits = np.full(64, -20.0)
    logits[: len(best)] = best
    return logits


def noise(seed: int = 0) -> np.ndarray:
    """g of every token right after PROMPT."""
    return np.asarray(position_noise(request_keys(seed, jnp.array([0])), jnp.array([[5]]), 64))[0, 0]


def margin(logits, tokens, params=WARM, seed=0) -> float:
    return choice_margin(logits, len(PROMPT), Request(0, seed, None, params), set(tokens))


def seed_that_prefers(token, *, over, logits):
    """The first seed whose noise lifts `token` well above the tokens `over`."""
    lifted = (seed for seed in range(1000) if (logits + noise(seed))[token] > (logits + noise(seed))[over].max() + 0.01)
    return next(lifted)


def test_equal_texts_diverge_nowhere_and_a_short_text_or_a_wrong_token_is_a_violation_with_its_place_and_margin():
    generator = make_generator(random_models())
    assert judge(generator, [1, 2, 3], [1, 2, 3]) == []
    [found] = judge(generator, [1, 2, 3], [1, 2])
    assert (found.position, found.near_tie) == (2, False)
    logits = uncached(generator.models, [[*PROMPT, 30]])[0, -1]
    best, second = (int(token) for token in np.argsort(logits)[::-1][:2])
    [found] = judge(generator, [30, best, 4], [30, second, 4])
    assert (found.prompt, found.position, found.near_tie) == (0, 1, False)
    assert found.margin == pytest.approx(logits[best] - logits[second], abs=1e-4)


def test_every_prompt_is_judged_with_its_own_noise():
    generator = make_generator(random_models(), sampling=SamplingParams(1.0, top_k=5))
    prompts, requests = random_prompts(3, shortest=4), [7, 0, 3]
    right = texts(generator.generate(prompts, "autoregressive", requests))
    wrong = [text[:3] + [(text[3] + 1) % 64] + text[4:] for text in right]
    found = generator.divergences(prompts, answers_of(*right), answers_of(*wrong), requests)
    assert [(entry.prompt, entry.position, entry.near_tie) for entry in found] == [(i, 3, False) for i in range(3)]


@pytest.mark.parametrize("params", [SamplingParams(), WARM])
def test_the_margin_is_the_gap_of_the_two_best_values_with_their_noise(params):
    drawn = 0.0 if params.greedy else noise()
    assert margin(ranked(3.0, 3.0 - 5e-5) - drawn, [0, 1], params) == pytest.approx(5e-5)
    assert margin(ranked(3.0, 3.0 - 2e-4) - drawn, [0, 1], params) == pytest.approx(2e-4)
    far_below = ranked(3.0, 1.0, 1.0) - drawn  # neither text is what the target chose
    assert margin(far_below, [1, 2], params) == pytest.approx(2.0)


MASSES = np.full(64, -60.0)
MASSES[:3] = np.log([0.6, 0.3, 0.1])


@pytest.mark.parametrize(
    ("logits", "params", "near"),
    [
        (ranked(3.0, 2.0, 1.0, 0.99999, -5.0), TOP_3, True),  # the third and fourth may change places
        (ranked(3.0, 2.0, 1.0, 0.0, -5.0), TOP_3, False),  # the third is the last one inside, and safely so
        # Tokens 0 and 1 hold 90 % between them, so token 2 is in at a top-p of 0.9 and a hair, and out just below.
        (MASSES, SamplingParams(1.0, top_p=0.9), True),
        (MASSES, SamplingParams(1.0, top_p=0.9001), False),
    ],
)
def test_a_token_is_near_an_edge_only_if_another_could_take_its_place(logits, params, near):
    seed = seed_that_prefers(2, over=[0, 1], logits=logits)
    runner_up = int((logits + noise(seed))[:2].argmax())
    assert (margin(logits, [2, runner_up], params, seed) <= NEAR_TIE) == near


def test_an_edge_excuses_no_token_that_would_not_be_chosen_inside_it():
    """Token 2 may leave top-3, but with or without it the choice is another: a text with it is wrong."""
    logits = ranked(3.0, 2.0, 1.0, 0.99999)
    seed = seed_that_prefers(0, over=[1, 2, 3], logits=logits)
    assert margin(logits, [0, 2], TOP_3, seed) > NEAR_TIE


@pytest.mark.parametrize(("best", "limit"), [(20.0, 0.25), (3.0, 0.03125), (-0.75, 0.015625)])
def test_in_bfloat16_two_units_in_the_last_place_are_a_near_tie(best, limit):
    """The larger magnitude decides: for -0.75 and -1.75 the second, which a high temperature may choose."""
    logits = [best, best - 1.0]
    assert near_tie_limit(jnp.bfloat16, logits, SamplingParams()) == limit
    assert near_tie_limit(jnp.bfloat16, logits, SamplingParams(0.5)) == 2 * limit
    assert near_tie_limit(jnp.float32, logits, SamplingParams()) == NEAR_TIE == 1e-4
