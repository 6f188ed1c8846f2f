"""Speculative decoding changes the speed and never the text: checked by equality (docs/equality.md).

A first divergence is let pass only as a shown near tie; their number is printed.
"""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.data.chat import encode_prompt
from domino_jax.decoding.generate import Generation
from domino_jax.method import rounds
from domino_jax.method.drafter import Drafter
from domino_jax.method.pair import Models
from domino_jax.method.settings import SamplingParams
from domino_jax.models.qwen3 import Qwen3
from domino_jax.weights import hf
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.target import load_target
from tests.helpers.decoding_models import (
    check_lossless,
    golden_models,
    make_generator,
    planted_drafts,
    random_drafter,
    random_models,
    random_prompts,
    texts,
)
from tests.helpers.models import GOLDEN_SETS, load_golden
from tests.helpers.paths import ASSETS

GREEDY, SAMPLED = SamplingParams(), SamplingParams(0.8, top_k=20, top_p=0.9)


def lengths_of(answers: list[Generation]) -> list[list[int]]:
    return [answer.accept_lengths for answer in answers]


@pytest.mark.parametrize(
    ("block_size", "shift_label", "batch", "sampling"),
    [(16, True, 8, GREEDY), (8, False, 1, SAMPLED)],
)
def test_a_random_drafter_changes_no_token(block_size, shift_label, batch, sampling):
    models = random_models(block_size, shift_label=shift_label)
    made = make_generator(models, cache_slots=96, max_new_tokens=48, batch_size=batch, sampling=sampling)
    check_lossless(made, random_prompts(16))


def test_a_tied_target_and_a_windowed_drafter_without_prefix_change_no_token():
    window = {"layer_types": ("sliding_attention",), "sliding_window": 4}
    models = random_models(4, tied=True, pure_draft_prefix_len=0, **window)
    made = make_generator(models, batch_size=8, sampling=SAMPLED, max_new_tokens=32)
    check_lossless(made, random_prompts(16), ("autoregressive", "domino"))


def test_a_dflash_drafter_changes_no_token():
    models = random_models(4, head="none", shift_label=False)
    made = make_generator(models, batch_size=8, sampling=SamplingParams(0.7, min_p=0.05))
    check_lossless(made, random_prompts(8), ("autoregressive", "backbone", "draft"))


def test_the_drafts_own_constant_changes_no_token():
    made = make_generator(random_models(4), batch_size=8, sampling=SAMPLED, scale=1e6)
    check_lossless(made, random_prompts(8), ("autoregressive", "domino"))


@pytest.mark.parametrize(("name", "sampling"), list(zip(GOLDEN_SETS, (GREEDY, SAMPLED), strict=True)))
def test_a_golden_drafter_changes_no_token_and_helps(name, sampling):
    prompts = [row["prompt"] for row in load_golden(name).figures["generate"]]
    prompts += [prompt[:length] for prompt in prompts for length in (1, 9)]
    made = make_generator(golden_models(name), cache_slots=128, max_new_tokens=48, batch_size=6, sampling=sampling)
    runs = check_lossless(made, prompts)
    lengths = np.concatenate(lengths_of(runs["domino"]))
    assert lengths.mean() > 1.3 and 1 in lengths and lengths.max() > 3


@pytest.mark.parametrize(
    ("shift_label", "step", "sampling"), [(True, 5, GREEDY), (False, 4, SAMPLED)], ids=["shifted", "unshifted"]
)
def test_a_drafter_that_is_always_right_or_always_wrong_sets_the_pace_and_not_the_text(shift_label, step, sampling):
    """Right (rows 0 to 2): B + 1 tokens a round shifted, B unshifted. Wrong (the others): one. 20 are to come."""
    models, prompts = random_models(4, shift_label=shift_label), random_prompts(6)
    made = make_generator(models, max_new_tokens=21, batch_size=6, sampling=sampling)
    expected = texts(made.generate(prompts, "autoregressive"))
    drafts = np.array(expected)
    drafts[3:] = (drafts[3:] + 1) % 64
    with planted_drafts(drafts):
        answers = made.generate(prompts, "domino")
    assert texts(answers) == expected
    right, wrong = [step] * (20 // step), [1] * 20
    assert [answer.accept_lengths for answer in answers] == [right] * 3 + [wrong] * 3


def test_rows_advance_by_different_amounts():
    """Each row's draft is wrong at a place of its own: a round ends with the token that replaces it."""
    models, prompts = random_models(4), random_prompts(3)
    made = make_generator(models, batch_size=3)
    expected = texts(made.generate(prompts, "autoregressive"))
    drafts = np.array(expected)
    for row, place in enumerate((1, 3, 9)):
        drafts[row, place] = (drafts[row, place] + 1) % 64
    with planted_drafts(drafts):
        answers = made.generate(prompts, "domino")
    assert texts(answers) == expected
    assert [answer.accept_lengths for answer in answers] == [[1, 5, 5, 4], [3, 5, 5, 2], [5, 4, 5, 1]]


def test_accepting_one_draft_too_many_is_caught(monkeypatch):
    """The control of this file: a loop that is not lossless must not pass."""
    accept = rounds.accept_chain
    monkeypatch.setattr(
        rounds,
        "accept_chain",
        lambda tokens, chosen: jnp.minimum(accept(tokens, chosen) + 1, tokens.shape[1] - 1),
    )
    with pytest.raises(AssertionError, match="not lossless"):
        check_lossless(make_generator(random_models(), batch_size=8), random_prompts(8), ("autoregressive", "domino"))


def test_choices_with_the_noise_of_the_next_position_are_caught(monkeypatch):
    """The same control for sampling; plain rounds count their positions themselves."""
    positions = rounds.draft_positions
    monkeypatch.setattr(rounds, "draft_positions", lambda *args: positions(*args) + 1)
    with pytest.raises(AssertionError, match="not lossless"):
        made = make_generator(random_models(), batch_size=8, sampling=SAMPLED)
        check_lossless(made, random_prompts(8), ("autoregressive", "domino"))


@functools.lru_cache
def tiny_target():
    config, params = load_target(ASSETS / "tiny_qwen3", jnp.float32)
    return Qwen3(config), params


def tiny_models(block_size: int | None) -> Models:
    """The shipped target with its own drafter (None), or with a random one of this block size."""
    target, params = tiny_target()
    if block_size is None:
        config, drafter_params = load_drafter(ASSETS / "tiny_domino", target.config, jnp.float32)
        return Models(target, params, Drafter(config), drafter_params)
    layers = {"num_layers": 1, "target_layer_ids": (1, target.config.num_hidden_layers // 2)}
    return Models(target, params, *random_drafter(target, block_size, **layers))


@functools.lru_cache
def held_out(count: int) -> list[list[int]]:
    """The first held-out prompts of at most 128 tokens: one bucket."""
    tokenizer = hf.load_tokenizer(ASSETS / "tiny_qwen3")
    rows = map(json.loads, (ASSETS / "tiny_qwen3" / "prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines())
    prompts = (encode_prompt(tokenizer, row, thinking=False) for row in rows)
    return [prompt for prompt in prompts if 64 < len(prompt) <= 128][:count]


def check_tiny(block_size, batch, sampling, count):
    models, prompts = tiny_models(block_size), held_out(count)
    assert len(prompts) == count
    stops = hf.stop_ids(ASSETS / "tiny_qwen3")
    made = make_generator(
        models, stop_ids=stops, cache_slots=256, max_new_tokens=64, batch_size=batch, sampling=sampling
    )
    return check_lossless(made, prompts)


def test_the_shipped_drafter_changes_no_token_of_the_shipped_target():
    runs = check_tiny(None, 1, GREEDY, 4)
    assert np.concatenate(lengths_of(runs["domino"])).mean() > 1.5


@pytest.mark.slow(minutes=0.7)
@pytest.mark.parametrize(
    ("block_size", "batch", "sampling"), [(None, 8, SAMPLED), (4, 1, SAMPLED), (8, 8, GREEDY), (16, 8, SAMPLED)]
)
def test_other_drafters_and_batches_change_no_token_of_the_shipped_target(block_size, batch, sampling):
    check_tiny(block_size, batch, sampling, 64)


@pytest.mark.slow(minutes=0.3)
@pytest.mark.parametrize("name", GOLDEN_SETS)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_full_grid_of_golden_pairs_changes_no_token(name, batch, sampling):
    whole = [row["prompt"] for row in load_golden(name).figures["generate"]]
    prompts = [prompt[: len(prompt) - cut] for prompt in whole for cut in range(8)]
    made = make_generator(golden_models(name), cache_slots=128, max_new_tokens=64, batch_size=batch, sampling=sampling)
    check_lossless(made, prompts)


@pytest.mark.slow(minutes=0.2)
@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_full_grid_of_random_pairs_changes_no_token(block_size, shift_label, batch, sampling):
    models = random_models(block_size, shift_label=shift_label)
    made = make_generator(models, cache_slots=96, max_new_tokens=64, batch_size=batch, sampling=sampling)
    check_lossless(made, random_prompts(64))
