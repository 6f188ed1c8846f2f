"""The jitted training step: what it learns, what λ leaves alone, and that it is what its parts say.

Padding blocks and slices: tests/decoding/test_golden.py. Equal runs: tests/commands/test_train_signals.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from domino_jax.method import blocks
from domino_jax.method.curriculum import lambda_base
from domino_jax.method.losses import Loss
from domino_jax.method.optimizer import learning_rate, make_optimizer
from domino_jax.method.pair import Pair
from domino_jax.method.state import init_state
from domino_jax.method.step import label_blocks, make_train_step, target_pass
from domino_jax.models.quantized import dequantized, is_quantized
from tests.helpers.decoding_models import in_eight_bits
from tests.helpers.models import loss_and_metrics, random_tokens, tiny_drafter, tiny_target

STEPS, ANCHORS = 80, 6
LOSS = Loss(gamma=4.0, slice_blocks=9)
KEY = jax.random.key(11)


def models(**choices):
    """An untied target and a drafter of one layer over its first layer."""
    target = tiny_target(tied=False)
    return target, tiny_drafter(target.config, layers=1, target_layer_ids=(0,), **choices)


def schedule():
    return learning_rate(1e-2, STEPS, 0.1)


def optimizer():
    return make_optimizer("adamw")


def norm(tree):
    """L2 norm over all leaves."""
    return np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(jax.device_get(tree))))


def batch_of(rows=4, length=24):
    """Random rows whose first three tokens are a prompt."""
    mask = jnp.ones((rows, length)).at[:, :3].set(0.0)
    return {"tokens": random_tokens((rows, length), seed=9), "loss_mask": mask, "row_ids": jnp.arange(rows)}


@functools.lru_cache
def train_step():
    target, drafter = models()
    return make_train_step(
        target.module,
        drafter.module,
        optimizer(),
        num_anchors=ANCHORS,
        learning_rate=schedule(),
        curriculum=lambda step: lambda_base(step, STEPS, 1.0, 1.0),
        loss=LOSS,
    )


@functools.lru_cache
def compiled_start():
    """Jitted () → the state before the first step; a fresh one each call, because steps donate theirs."""
    return jax.jit(lambda: init_state(models()[1].module, optimizer(), jax.random.key(0)))


def run(steps):
    """(state, [metrics]) of a fresh run."""
    target, _ = models()
    state = compiled_start()()
    metrics = []
    for _ in range(steps):
        state, figures = train_step()(state, target.params, batch_of(), KEY)
        metrics.append(jax.device_get(figures))
    return jax.device_get(state), metrics


def test_a_handful_of_rows_is_overfitted():
    """ln 80 = 4.4 at the start; random tokens can be learnt by heart only."""
    _, metrics = run(STEPS)
    assert metrics[0]["final_loss"] > 4.0
    assert metrics[-1]["final_loss"] < 2.0
    assert metrics[-1]["accept_len"] > metrics[0]["accept_len"] + 1.5
    # Each step draws other anchors, so the ends of the rows cut other blocks.
    assert len({int(figures["predictions"]) for figures in metrics}) > 3


THREE = jnp.array([[4, 9, 20], [3, 8, 11]])  # anchors of two rows of 24 tokens


@functools.lru_cache
def measured(share, loss=LOSS, head="domino"):
    """(loss, gradients) of random parameters on two rows of three blocks; head: "none" leaves it out."""
    target, drafter = models(head=head)
    params = {name: part for name, part in models()[1].params.items() if name in drafter.params}

    def loss_of(params):
        features, _ = target_pass(target.module, target.params, batch_of(2), drafter.config.target_layer_ids)
        drawn = label_blocks(batch_of(2), THREE, jnp.ones(THREE.shape, bool), drafter.config, loss)
        pair = Pair(target.module, target.params, drafter.module, params)
        return loss_and_metrics(pair, features, batch_of(2), drawn, loss, share)[0]

    return jax.device_get(jax.jit(jax.value_and_grad(loss_of))(params))


def test_at_lambda_one_head_gradients_are_exactly_zero():
    assert all((leaf == 0.0).all() for leaf in jax.tree.leaves(measured(1.0)[1]["head"]))
    assert all((leaf != 0.0).any() for leaf in jax.tree.leaves(measured(0.9)[1]["head"]))


def test_at_lambda_one_backbone_gradients_equal_those_of_plain_shifted_dflash():
    domino, dflash = measured(1.0)[1], measured(0.0, head="none")[1]
    assert norm(dflash) > 0.1
    for ours, plain in zip(jax.tree.leaves(domino["backbone"]), jax.tree.leaves(dflash["backbone"]), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_no_gradient_enters_a_frozen_backbone_and_the_heads_is_as_before():
    (value, free), (same, frozen) = measured(0.9), measured(0.9, dataclasses.replace(LOSS, frozen_backbone=True))
    assert value == same and norm(free["backbone"]) > 0 == norm(frozen["backbone"])
    for one, other in zip(jax.tree.leaves(free["head"]), jax.tree.leaves(frozen["head"]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------------------------------ a whole step


@pytest.mark.long
def test_a_step_is_its_parts():
    """Anchors of the folded key, the dual loss, the optimizer's update: the step's parameters, done by hand."""
    target, drafter = models()
    batch = batch_of()

    @jax.jit
    def by_hand(state):
        anchors, keep = blocks.sample_anchors(jax.random.fold_in(KEY, 0), batch["loss_mask"], batch["row_ids"], ANCHORS)
        drawn = label_blocks(batch, anchors, keep, drafter.config, LOSS)
        features, _ = target_pass(target.module, target.params, batch, drafter.config.target_layer_ids)

        def loss_of(params):
            models = Pair(target.module, target.params, drafter.module, params)
            return loss_and_metrics(models, features, batch, drawn, LOSS, 1.0)[0]

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        updates, _ = optimizer().update(gradients, state.opt_state, state.params)
        scaled = jax.tree.map(lambda update: schedule()(0) * update, updates)
        return keep, loss, gradients, optax.apply_updates(state.params, scaled)

    keep, loss, gradients, expected = jax.device_get(by_hand(compiled_start()()))
    stepped, metrics = run(1)
    np.testing.assert_allclose(metrics[0]["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics[0]["grad_norm"], norm(gradients), rtol=1e-4)
    assert metrics[0]["anchors"] == keep.sum() == 4 * ANCHORS
    # Adam's first step is ± the rate for every gradient above eps, so compare where the sign is certain.
    for ours, hand, gradient in zip(*map(jax.tree.leaves, (stepped.params, expected, gradients)), strict=True):
        certain = abs(gradient) > 1e-5
        np.testing.assert_allclose(ours[certain], hand[certain], rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_a_step_on_a_quantized_target_is_that_on_its_dequantized_weights():
    """The lm_head is in eight bits too, and gradients flow through it."""
    target, _ = models()
    rounded = in_eight_bits(Pair(target.module, target.params), "target").target_params
    floating = jax.tree.map(lambda x: dequantized(x) if is_quantized(x) else x, rounded, is_leaf=is_quantized)
    both = [train_step()(compiled_start()(), params, batch_of(), KEY)[1] for params in (rounded, floating)]
    ours, expected = jax.device_get(both)
    assert ours["grad_norm"] > 0
    for name in ("loss", "grad_norm", "accuracy"):
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-4)
