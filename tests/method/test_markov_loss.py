"""The loss of the Markov heads: its terms by hand, what carries no gradient, and its slices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.heads.markov import MarkovObjective, MarkovSettings
from domino_jax.method.losses import Labels, Outputs, sliced_loss

SETTINGS = MarkovSettings(gamma=None)
LOG3 = float(np.log(3.0))


def measured(final, target, confidence, label_weights, ids=None, weights=None, settings=SETTINGS):
    """(loss, metrics) of one row of blocks, arrays [n, G, ...]."""
    label_weights = jnp.asarray(label_weights, jnp.float32)
    ids = jnp.zeros(label_weights.shape, jnp.int32) if ids is None else jnp.asarray(ids)
    labels = Labels(ids, label_weights, label_weights if weights is None else jnp.asarray(weights))
    objective = MarkovObjective(settings, jnp.float32(0.7), labels.weight)
    final = jnp.asarray(final, jnp.float32)
    target = None if target is None else jnp.asarray(target, jnp.float32)
    extra = None if confidence is None else jnp.asarray(confidence, jnp.float32)
    sums = objective.block_sums(Outputs(final, final, target, extra), labels)
    return float(objective.loss(sums)), {name: float(value) for name, value in objective.metrics(sums).items()}


# Two slots of two tokens: q = (3/4, 1/4), p = (1/2, 1/2), then q = p. So L1 is 1/2 and 0, α is 3/4 and 1.
FINAL, TARGET = [[[LOG3, 0.0], [0.0, 0.0]]], [[[0.0, 0.0], [0.0, 0.0]]]


def test_the_three_terms_and_the_metrics_by_hand():
    loss, metrics = measured(FINAL, TARGET, [[0.0, 0.0]], [[1, 1]])
    cross_entropy, distance, confidence = (np.log(4 / 3) + np.log(2)) / 2, 0.25, np.log(2)
    assert loss == pytest.approx(0.1 * cross_entropy + 0.9 * distance + confidence, abs=1e-5)
    assert metrics["loss"] == loss and "lambda_base" not in metrics
    assert metrics["final_loss"] == pytest.approx(cross_entropy, abs=1e-5)
    assert (metrics["l1_loss"], metrics["confidence_loss"]) == pytest.approx((distance, confidence), abs=1e-5)
    assert metrics["confidence_abs_error"] == pytest.approx((0.25 + 0.5) / 2, abs=1e-5)
    assert metrics["tau_probabilistic"] == pytest.approx(1 + 0.75 + 0.75, abs=1e-5)
    assert metrics["teacher_agreement"] == 1.0  # ties of equal logits go to the first
    assert (metrics["teacher_top1_prob"], metrics["draft_top1_prob"]) == pytest.approx((0.5, 0.625), abs=1e-5)


def test_without_a_target_or_a_confidence_head_the_other_terms_are_left_out():
    loss, metrics = measured(FINAL, None, None, [[1, 1]], settings=dataclasses.replace(SETTINGS, weights=(1, 0, 0)))
    assert loss == pytest.approx((np.log(4 / 3) + np.log(2)) / 2, abs=1e-5)
    assert not {"l1_loss", "confidence_loss", "tau_probabilistic"} & set(metrics)
    assert "confidence_loss" not in measured(FINAL, TARGET, None, [[1, 1]])[1]
    assert not dataclasses.replace(SETTINGS, weights=(1.0, 0.0, 0.0)).reads_target and SETTINGS.reads_target


def test_no_label_at_all_is_a_loss_of_zero():
    loss, metrics = measured(FINAL, TARGET, [[0.0, 0.0]], [[0, 0]])
    assert loss == 0.0 and all(np.isfinite(value) for value in metrics.values())


def test_no_gradient_flows_through_the_teacher_or_the_chance_that_confidence_learns():
    labels = Labels(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2)), jnp.ones((1, 2)))
    settings = dataclasses.replace(SETTINGS, weights=(0.0, 0.0, 1.0))
    objective = MarkovObjective(settings, 0.0, labels.weight)

    def loss_of(final, confidence):
        return objective.loss(objective.block_sums(Outputs(final, final, jnp.asarray(TARGET), confidence), labels))

    of_final, of_confidence = jax.grad(loss_of, argnums=(0, 1))(jnp.asarray(FINAL), jnp.zeros((1, 2)))
    assert (of_final == 0.0).all()
    np.testing.assert_allclose(of_confidence, [[(0.5 - 0.75) / 2, (0.5 - 1.0) / 2]], atol=1e-6)


RNG = np.random.default_rng(1)
HIDDEN = jnp.asarray(RNG.standard_normal((2, 7, 4, 6)), jnp.float32)
MATRIX = jnp.asarray(RNG.standard_normal((6, 9)), jnp.float32)
LABELS = Labels(
    jnp.asarray(RNG.integers(0, 9, (2, 7, 4))),
    *[jnp.cumprod(jnp.asarray(RNG.random((2, 7, 4)) < 0.8, jnp.float32), axis=-1)] * 2,
)


@functools.lru_cache
def sliced(size: int):
    """(loss, metrics) and gradients of toy logits, `size` blocks at a time."""
    objective = MarkovObjective(dataclasses.replace(SETTINGS, slice_blocks=size), 0.0, LABELS.weight)

    def outputs_of(matrix, rows, confidence, states):
        return Outputs(rows @ matrix, jnp.tanh(rows @ matrix), jnp.sin(states), confidence)

    def loss_of(matrix, hidden):
        inputs = (hidden, hidden.sum(-1))
        loss, sums = sliced_loss(outputs_of, matrix, inputs, (LABELS, HIDDEN @ MATRIX), objective)
        return loss, objective.metrics(sums)

    return jax.device_get(jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True))(MATRIX, HIDDEN))


@pytest.mark.parametrize("size", [2, 3])
def test_slices_agree_with_the_whole(size):
    (loss, metrics), gradients = sliced(size)
    (whole, whole_metrics), whole_gradients = sliced(7)
    assert loss == pytest.approx(float(whole), rel=1e-6) and loss == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert {"l1_loss", "confidence_loss", "tau_probabilistic"} < set(metrics)
    for name, value in whole_metrics.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-5), name
    for ours, expected in zip(gradients, whole_gradients, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
