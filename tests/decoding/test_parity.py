"""bfloat16: in fixed shape texts are equal without exception; else each first divergence is a near tie, and counted."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.data.chat import TextCodec
from domino_jax.evals.near_ties import near_tie_limit
from domino_jax.method.drafter import Drafter
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingParams
from domino_jax.models.qwen3 import Qwen3
from domino_jax.runtime.errors import DominoError
from domino_jax.weights import hf
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.target import load_target
from tests.helpers.decoding_models import (
    CHAINS,
    SmallGenerator,
    check_lossless,
    make_generator,
    random_models,
    texts,
    uncached,
)
from tests.helpers.paths import ASSETS

pytestmark = pytest.mark.long

GREEDY, WARM = SamplingParams(), SamplingParams(1.0)


@functools.lru_cache
def shipped(dtype=jnp.bfloat16) -> Pair:
    config, params = load_target(ASSETS / "tiny_qwen3", dtype)
    drafter, drafter_params = load_drafter(ASSETS / "tiny_domino", config, dtype)
    return Pair(Qwen3(config, dtype), params, Drafter(drafter, dtype), drafter_params)


@functools.lru_cache
def shallow(parity: str) -> SmallGenerator:
    """The shipped pair with six of the target's layers, whose programs compile in a quarter of the time."""
    models = shipped()
    target = dataclasses.replace(models.target.config, num_hidden_layers=6)
    drafter = dataclasses.replace(models.drafter.config, num_target_layers=6, target_layer_ids=(0, 1, 2, 3, 5))
    modules = Qwen3(target, jnp.bfloat16), Drafter(drafter, jnp.bfloat16)
    models = Pair(modules[0], models.target_params, modules[1], models.drafter_params)
    shape = {"cache_length": 384, "max_new_tokens": 32, "batch_size": 4, "draft_sharpness": math.inf}
    return make_generator(models, **shape, sampling=WARM, parity=parity)


@functools.lru_cache
def prompts(count: int) -> list[list[int]]:
    tokenizer = hf.load_tokenizer(ASSETS / "tiny_qwen3")
    lines = (ASSETS / "tiny_qwen3" / "prompts_heldout.jsonl").read_text().splitlines()[:count]
    return [TextCodec(tokenizer, False).encode(json.loads(line), "prompt") for line in lines]


def in_bfloat16(models: Pair) -> Pair:
    target, drafter = (module.clone(dtype=jnp.bfloat16) for module in (models.target, models.drafter))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (models.target_params, models.drafter_params))
    return Pair(target, params[0], drafter, params[1])


def cached_bits(made: SmallGenerator, mode: str) -> list[np.ndarray]:
    """The bits of all keys and values that four answers left in the cache, row by row."""
    lengths = np.array([len(prompt) for prompt in prompts(4)])
    state = made.advance(made.start(prompts(4), range(4)), mode, made.settings.max_new_tokens)
    assert (state.lengths == lengths + 31).all()
    layers = [np.asarray(part).view(np.uint16) for layer in state.target_cache for part in layer]
    return [np.stack([part[row, :, end : end + 31] for part in layers]) for row, end in enumerate(lengths)]


def test_in_fixed_shape_bfloat16_texts_are_equal_and_all_that_is_cached_is_to_the_last_bit():
    """Texts of a sure model are equal in any shape; the bits show more."""
    made = shallow("fixed_shape")
    plain, fast = (texts(made.generate(prompts(8), mode)) for mode in ("autoregressive", "domino"))
    assert plain == fast
    plain, fast = (cached_bits(made, mode) for mode in ("autoregressive", "domino"))
    assert all((one == two).all() for one, two in zip(plain, fast, strict=True))


def test_by_default_bfloat16_texts_part_at_near_ties_alone():
    check_lossless(shallow("near_tie"), prompts(8), ("autoregressive", "domino"))


def test_each_bfloat16_token_is_the_targets_choice_within_rounding():
    """The verify-argmax rule: given the text so far, no other token's logit is more than a near tie above."""
    models = in_bfloat16(random_models())
    made = make_generator(models)
    [answer] = made.generate([[7, 8, 9]], "domino")
    text = [7, 8, 9]
    for token in answer.token_ids:
        logits = uncached(models, [text])[0, -1]
        compared = [logits.max(), logits[token]]
        assert compared[0] - compared[1] <= near_tie_limit(jnp.bfloat16, compared, GREEDY)
        text.append(token)


def test_fixed_shape_needs_a_width():
    models = random_models()
    with pytest.raises(DominoError, match="fixed_shape"):
        make_generator(Pair(models.target, models.target_params), parity="fixed_shape")


@pytest.mark.slow
def test_in_fixed_shape_64_prompts_of_64_tokens_are_all_equal():
    shape = {"cache_length": 384, "max_new_tokens": 64, "batch_size": 8, "draft_sharpness": math.inf}
    made = make_generator(shipped(), **shape, sampling=WARM, parity="fixed_shape")
    runs = {mode: texts(made.generate(prompts(64), mode)) for mode in CHAINS}
    assert runs["backbone"] == runs["domino"] == runs["autoregressive"]


@pytest.mark.slow
def test_in_float32_the_shipped_drafter_changes_no_token_of_64_prompts_and_helps():
    sampling = SamplingParams(0.8, top_k=20, top_p=0.9)
    shape = {"cache_length": 384, "max_new_tokens": 64, "batch_size": 8, "sampling": sampling}
    made = make_generator(shipped(jnp.float32), stop_ids=hf.stop_ids(ASSETS / "tiny_qwen3"), **shape)
    lengths = [length for answer in check_lossless(made, prompts(64))["domino"] for length in answer.accept_lengths]
    assert np.mean(lengths) > 1.5
