"""A prefill makes no array that grows with the square of the prompt, nor logits of rows that nobody asks for."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import loop
from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafter import Drafter, init_drafter_params
from domino_jax.method.loop import Prompts, prefill
from domino_jax.method.pair import Pair
from domino_jax.method.sampling import request_keys
from domino_jax.method.settings import SamplingParams
from domino_jax.models import attention
from domino_jax.models.attention import attend, attend_prompts, causal_mask
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from tests.helpers.decoding_models import make_generator, random_models, random_prompts
from tests.helpers.paths import ROOT

PROMPT = 4_096


def draw(batch: int, length: int):
    """q, k, v of 4 query heads over 2 key/value heads, 8 wide."""
    rng = np.random.default_rng(5)
    return [jnp.asarray(rng.standard_normal((batch, heads, length, 8)), jnp.float32) for heads in (4, 2, 2)]


def test_attention_over_slices_of_prompts_equals_one_dense_mask(monkeypatch):
    """Slices of 64 queries, the last one short, of two prompts of 200 tokens."""
    q, k, v = draw(2, 200)
    monkeypatch.setattr(attention, "PREFILL_SCORES", 1)
    sliced = jax.jit(attend_prompts)(q, k, v)
    np.testing.assert_allclose(sliced, attend(q, k, v, causal_mask(jnp.arange(200), 200)), atol=1e-6)


LONG = [*random_prompts(1, 150, 150), *random_prompts(1, 64, 64), *random_prompts(1, 7, 7)]


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["domino", "eagle3"])
def test_a_prefill_in_chunks_leaves_the_state_and_the_answers_of_one_pass(monkeypatch, drafter):
    """Prompts of 150, 64 and 7 tokens in chunks of 64, also at the end of one. The caches' limit of 200 is no
    multiple of 64, so the last chunk overlaps the one before it."""
    models, states, answers = random_models(head=drafter), [], []
    for tokens in (2**20, 1):
        monkeypatch.setattr(loop, "PREFILL_TOKENS", tokens)
        made = make_generator(models, cache_length=200, batch_size=3, sampling=SamplingParams(1.0))
        states.append(made.start(LONG, range(3)))
        answers.append(made.generate(LONG, "draft"))
    whole, chunked = states
    assert answers[0] == answers[1]
    assert (whole.anchors == chunked.anchors).all()
    for one, two in zip(jax.tree.leaves(caches(whole)), jax.tree.leaves(caches(chunked)), strict=True):
        for row, prompt in enumerate(LONG):
            # Keys and values of a prompt's rows, but for EAGLE-3's last one, which the first round writes.
            used = (slice(None), slice(len(prompt) - (drafter == "eagle3"))) if one.ndim == 4 else ()
            np.testing.assert_allclose(two[row][used], one[row][used], atol=2e-5)


def caches(state):
    return state.target_cache, state.draft_cache


def shapes_of(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@functools.lru_cache
def as_wide_as_qwen3_8b(vocab: int = 1_024) -> Pair:
    """Two layers and a drafter of one with Qwen3-8B's widths, float32, as shapes."""
    raw = json.loads((ROOT / "assets/qwen3_configs/8b/config.json").read_text())
    config = dataclasses.replace(Qwen3Config.from_dict(raw), vocab_size=vocab, num_hidden_layers=2)
    target = Qwen3(config)
    params = jax.eval_shape(target.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    block = {"shift_label": False, "num_layers": 1, "target_layer_ids": (0,), "block_size": 16, "mask_token_id": 1}
    drafter = Drafter(DrafterConfig.for_target(config, **block))
    drafter_params = jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0)))
    return Pair(target, shapes_of(params), drafter, shapes_of(drafter_params))


def prefill_lowered(models: Pair, batch: int):
    def run(models, tokens, ones):
        prompts = Prompts(tokens, ones, ones, request_keys(0, ones))
        return prefill(models, prompts, ones[:1], slots=PROMPT, buffer=32, sampling=SamplingParams())

    ids = jax.ShapeDtypeStruct((batch, PROMPT), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    return jax.jit(run).lower(models, *ids)


def test_a_prefill_of_4096_tokens_of_qwen3_8bs_widths_needs_little_besides_its_results():
    """All scores of one layer are 2.1 GB and their exponentials as much again; in slices 0.27 GB each."""
    lowered = prefill_lowered(as_wide_as_qwen3_8b(), batch=1)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 1.1e9


def test_one_row_of_a_prompt_goes_through_the_lm_head():
    text = prefill_lowered(as_wide_as_qwen3_8b(vocab=1_031), batch=2).as_text()
    assert "tensor<2x1x1031xf32>" in text and f"2x{PROMPT}x1031x" not in text
