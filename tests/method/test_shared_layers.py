"""Layers that are alike are traced and lowered once for each program, however many there are."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

from domino_jax.method.loop import Prompts, prefill
from domino_jax.method.pair import Pair
from domino_jax.method.rounds import speculative_round
from domino_jax.method.sampling import request_keys
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.models import decoder_layer
from tests.helpers.decoding_models import random_drafter, random_target


def models(layers: int, sparse: bool) -> Pair:
    """Shapes that no other test has, so that nothing of them is traced yet."""
    target, params = random_target(83 + sparse, layers=layers, sparse=sparse)
    return Pair(
        target,
        params,
        *random_drafter(target, layer_types=("full_attention",) * (layers - 1), target_layer_ids=(layers - 2,)),
    )


def round_of(models):
    row = jnp.ones(1, jnp.int32)
    prompts = Prompts(jnp.ones((1, 4), jnp.int32), row, row, request_keys(row, row))
    start = functools.partial(prefill, slots=32, buffer=8, sampling=SamplingParams())
    state = jax.eval_shape(start, models, prompts, row)
    run = jax.jit(lambda *arguments: speculative_round(*arguments, SamplingParams(), DraftSettings()))
    return run, (models, state, row)


@pytest.mark.parametrize("sparse", [False, True])
def test_layers_that_are_alike_are_traced_and_lowered_once(sparse, monkeypatch):
    """A dense and a sparse kind of target layers, and the context pass and the block pass of the drafter's."""
    traced, keys_values = collections.Counter(), decoder_layer.SelfAttention.keys_values

    def counted(self, x, angles):
        traced[x.shape] += 1
        return keys_values(self, x, angles)

    monkeypatch.setattr(decoder_layer.SelfAttention, "keys_values", counted)
    texts = []
    for layers in (4, 8):
        function, arguments = round_of(models(layers, sparse))
        traced.clear()
        texts.append(function.lower(*arguments).as_text())
        assert sum(traced.values()) == 3 + sparse
    assert texts[0].count("func.func") == texts[1].count("func.func")
