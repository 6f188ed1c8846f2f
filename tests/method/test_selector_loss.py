"""DFlash2's loss: its two terms, slices and micro-batches, and the run that it reports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.heads.dflash2 import (
    SelectorObjective,
    SelectorSettings,
    leading_run,
)
from domino_jax.method.pair import Models
from domino_jax.method.step import batch_gradients, label_blocks
from tests.helpers.models import random_tokens, tiny_drafter, tiny_target

ALPHA = 0.5


@functools.lru_cache
def models():
    """An untied target and a drafter of one layer; blocks of 4, 5 candidates of 80 tokens."""
    target = tiny_target(tied=False)
    return target, tiny_drafter(target.config, head="dflash2", shift_label=False, layers=1, target_layer_ids=(0,))


@pytest.mark.parametrize(("right", "expected"), [("1101", 3.0), ("0111", 1.0), ("1111", 5.0), ("0000", 1.0)])
def test_the_leading_run_counts_the_bonus_and_ends_at_the_first_wrong_slot(right, expected):
    assert float(leading_run(jnp.array([cell == "1" for cell in right]))) == expected


@functools.lru_cache
def gradients(slice_blocks=3, alpha=ALPHA, accumulate=1):
    """(metrics, gradients) of two rows with 5 blocks each."""
    target, drafter = models()
    settings = SelectorSettings(4.0, False, slice_blocks=slice_blocks, alpha=alpha)
    mask = jnp.ones((2, 16)).at[:, :3].set(0.0).at[0, 8].set(0.0)
    batch = {"tokens": random_tokens((2, 16), seed=5), "loss_mask": mask, "row_ids": jnp.arange(2)}
    anchors, keep = jnp.array([[3, 5, 6, 9, 13], [4, 7, 10, 14, 0]]), jnp.ones((2, 5), bool).at[1, 4].set(False)

    @jax.jit
    def run(params):
        bundle = Models(target.module, target.params, drafter.module, params)
        drawn = label_blocks(batch, anchors, keep, drafter.config, settings)
        objective = SelectorObjective(settings, 0.0, drawn.labels.weight)
        found, by_params = batch_gradients(bundle, batch, drawn, objective, accumulate)
        return objective.metrics(found), by_params

    return jax.device_get(run(drafter.params))


def assert_same(one, other):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), one, other)


@pytest.mark.parametrize("changes", [{"slice_blocks": 5}, {"slice_blocks": 1}, {"accumulate": 2}])
def test_slices_and_micro_batches_change_nothing(changes):
    assert_same(gradients(), gradients(**changes))


def test_the_loss_is_the_two_terms_and_alpha_zero_leaves_the_selector_alone():
    (metrics, _), (plain, by_params) = gradients(), gradients(alpha=0.0)
    assert metrics["loss"] > metrics["base_loss"]
    assert float(plain["loss"]) == float(plain["base_loss"])
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(by_params["head"]))
    assert 0 < metrics["selector_coverage"] < 1
