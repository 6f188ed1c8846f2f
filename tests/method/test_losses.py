"""The dual loss: accepted lengths, masks, D-PACE weights. Values, gradients, slices: tests/decoding/test_golden.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import losses
from domino_jax.method.losses import Loss, accepted_lengths, cross_entropy, dpace_weights
from tests.helpers.models import tiny_drafter, tiny_target


@functools.partial(jax.jit, static_argnums=(4, 5))
def block_sums(base, final, labels, weights, config, loss):
    return loss.block_sums(losses.Outputs(base, final), labelled(labels, weights, config, loss))


def labelled(labels, weights, config, loss):
    return losses.Labels(labels, weights, losses.weigh_slots(weights, config, loss))


def dual_loss(sums, share):
    """(loss, metrics) of a whole batch."""
    metrics = Loss(lambda_base=share, divisor=sums["divisor"]).metrics(sums)
    return metrics["loss"], metrics


SHIFTED = tiny_drafter(tiny_target().config, True).config  # blocks of 4


@pytest.mark.parametrize(
    "correct, weights, expected",
    [
        pytest.param("1111", "1111", 5.0, id="all right, shifted: G+1"),
        pytest.param("0111", "0111", 4.0, id="all right, unshifted: G"),
        pytest.param("0111", "1111", 1.0, id="first slot wrong"),
        pytest.param("1011", "1111", 2.0, id="second slot wrong"),
        pytest.param("1110", "1111", 4.0, id="last slot wrong"),
        pytest.param("1011", "1011", 4.0, id="a slot without label does not break the run, nor count"),
        pytest.param("1111", "1100", 3.0, id="right slots without label do not count"),
        pytest.param("0000", "0000", 1.0, id="no label at all: the bonus alone"),
    ],
)
def test_accept_len(correct, weights, expected):
    correct, weights = (jnp.array([cell == "1" for cell in text]) for text in (correct, weights))
    assert float(accepted_lengths(correct, weights.astype(jnp.float32))) == expected


def test_the_weight_of_many_blocks_is_as_exact_as_float32_is():
    """128 blocks of eight slots with γ 4: a plain loop in float32 gives 500.352."""
    config = dataclasses.replace(SHIFTED, block_size=8)
    labels = labelled(jnp.zeros((4, 32, 8), jnp.int32), jnp.ones((4, 32, 8)), config, Loss(gamma=4.0))
    exact = 128 * np.exp(-np.arange(8) / 4).sum()
    np.testing.assert_allclose(jax.jit(lambda labels: labels.divisor)(labels), exact, rtol=3e-7)


def test_a_batch_without_any_label_has_loss_zero_and_no_nan():
    logits = jnp.zeros((1, 4, 9))
    sums = block_sums(logits, logits, jnp.array([[0, 1, 2, 3]]), jnp.zeros((1, 4)), SHIFTED, Loss())
    loss, metrics = dual_loss(sums, jnp.float32(0.5))
    assert float(loss) == 0.0
    assert all(np.isfinite(float(value)) for value in metrics.values())


def test_logits_and_labels_of_slots_without_weight_do_not_matter():
    weights = jnp.array([[1.0, 0.0, 1.0, 1.0]])
    labels = jnp.array([[1, 2, 3, 0]])
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 9)), jnp.float32)

    def loss(logits, labels):
        return dual_loss(block_sums(logits, 2 * logits, labels, weights, SHIFTED, Loss()), 0.3)[0]

    assert loss(logits, labels) == loss(logits.at[0, 1].set(50.0), labels.at[0, 1].set(7))
    gradient = jax.grad(loss)(logits, labels)
    assert (gradient[0, 1] == 0.0).all() and (gradient[0, 0] != 0.0).all()


def naive_dpace(losses, weights, alpha):
    """The weights of D-PACE as loops over one block."""
    q = [(1 - alpha) * np.exp(-loss) + alpha if w > 0 else 1.0 for loss, w in zip(losses, weights, strict=True)]
    out = []
    for k in range(len(losses)):
        total = 0.0
        for i in range(k, len(losses)):
            reached = 1.0
            for j in range(i + 1):
                reached *= q[j]
            total += reached * weights[i]
        out.append(total)
    return out


@pytest.mark.parametrize("weights", [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_dpace_equals_the_naive_loop(alpha, weights):
    slot_losses = [0.1, 2.0, 0.5, 1.0, 3.0]
    ours = dpace_weights(jnp.array(slot_losses), jnp.array(weights, jnp.float32), alpha)
    np.testing.assert_allclose(ours, naive_dpace(slot_losses, weights, alpha), rtol=1e-5)


def test_no_gradient_flows_through_dpace_weights():
    gradient = jax.grad(lambda losses: dpace_weights(losses, jnp.ones(3), 0.5).sum())(jnp.array([0.1, 2.0, 0.5]))
    assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_dpace_replaces_the_decay_and_divides_by_the_labels():
    labels, weights = jnp.array([[0, 1, 2, 3]]), jnp.ones((1, 4))
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 9)), jnp.float32)
    losses = cross_entropy(logits, labels)[0]
    expected = np.dot(naive_dpace(losses.tolist(), [1, 1, 1, 1], 0.5), losses)
    for gamma in (None, 7.0):
        sums = block_sums(logits, logits, labels, weights, SHIFTED, Loss(gamma=gamma, dpace_alpha=0.5))
        np.testing.assert_allclose(sums["final_loss"], expected, rtol=1e-5)
        assert float(sums["divisor"]) == 4.0
