"""Logits are the float32 sums of their products, whatever the dtype of the operands, tied or not."""

import re

import jax
import jax.numpy as jnp
import pytest

from domino_jax.method.pair import Pair
from tests.helpers.decoding_models import random_models

BF16 = jnp.bfloat16


def in_bfloat16(models: Pair) -> Pair:
    target, drafter = (module.clone(dtype=BF16) for module in (models.target, models.drafter))
    params = jax.tree.map(lambda leaf: leaf.astype(BF16), (models.target_params, models.drafter_params))
    return Pair(target, params[0], drafter, params[1])


def product_types(function, *arguments, platform: str) -> list[str]:
    """Element types of the results of all matrix products, as the program that the compiler gets has them."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    return [re.search(r"-> tensor<(?:\d+x)*(\w+)>", line)[1] for line in products]


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_product_that_makes_logits_has_float32_results(tied, rows, platform):
    models = in_bfloat16(random_models(tied=tied))
    hidden = jnp.ones((1, rows, 32), BF16)
    kinds = product_types(lambda models, hidden: models.unembed(hidden), models, hidden, platform=platform)
    assert kinds == ["f32"]


@pytest.mark.parametrize("method", ["residual", "residual_of"])
def test_the_heads_correction_leaves_its_product_in_float32(method):
    models = in_bfloat16(random_models())
    inner = [jnp.ones((1, 2, 8), BF16)]
    inner += [models.head.rows(jnp.zeros((1, 4), jnp.int32))] if method == "residual_of" else []
    kinds = product_types(lambda models, *inner: getattr(models.head, method)(*inner), models, *inner, platform="tpu")
    assert kinds == ["f32"]
