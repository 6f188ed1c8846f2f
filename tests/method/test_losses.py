"""The dual loss: values, masks, additivity, slices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import losses
from domino_jax.method.losses import Loss, accepted_lengths, cross_entropy, dpace_weights
from domino_jax.method.sliced_loss import SlicedForward, sliced_loss
from tests.helpers.models import tiny_drafter, tiny_target


@functools.partial(jax.jit, static_argnums=(4, 5))
def block_sums(base, final, labels, weights, config, loss):
    return loss.block_sums(losses.Outputs(base, final), labelled(labels, weights, config, loss))


def labelled(labels, weights, config, loss):
    return losses.Labels(labels, weights, losses.slot_weights(weights, config, loss))


def dual_loss(sums, share):
    """(loss, metrics) of a whole batch."""
    metrics = Loss(lambda_base=share, weight=sums["weight"]).metrics(sums)
    return metrics["loss"], metrics


SHIFTED = tiny_drafter(tiny_target().config, True).config  # blocks of 4
UNSHIFTED = tiny_drafter(tiny_target().config, False).config
METRICS = ("loss", "final_loss", "base_loss", "accuracy", "base_accuracy", "accept_len", "base_accept_len")


def accepted(correct, weights):
    """Both as texts of 0 and 1."""
    correct, weights = (jnp.array([cell == "1" for cell in text]) for text in (correct, weights))
    return float(accepted_lengths(correct, weights.astype(jnp.float32)))


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
    assert accepted(correct, weights) == expected


def uniform_blocks(labels, weights, config=SHIFTED, gamma=None, right=()):
    """Sums of blocks over 4 tokens: final logits 2·ln 3 on token 0 in slots `right`, else flat; base logits flat."""
    labels, weights = jnp.array(labels), jnp.array(weights, jnp.float32)
    base = np.zeros((*labels.shape, 4), np.float32)
    final = base.copy()
    for block, slot in right:
        final[block, slot, 0] = 2 * np.log(3.0)
    return block_sums(base, final, labels, weights, config, Loss(gamma=gamma))


def test_the_weight_of_many_blocks_is_as_exact_as_float32_is():
    """128 blocks of eight slots with γ 4: a plain loop in float32 gives 500.352."""
    config = dataclasses.replace(SHIFTED, block_size=8)
    labels = labelled(jnp.zeros((4, 32, 8), jnp.int32), jnp.ones((4, 32, 8)), config, Loss(gamma=4.0))
    exact = 128 * np.exp(-np.arange(8) / 4).sum()
    np.testing.assert_allclose(jax.jit(lambda labels: labels.weight)(labels), exact, rtol=3e-7)


def test_a_batch_without_any_label_has_loss_zero_and_no_nan():
    loss, metrics = dual_loss(uniform_blocks([[0, 1, 2, 3]], [[0, 0, 0, 0]]), jnp.float32(0.5))
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
        assert float(sums["weight"]) == 4.0


# Two rows of seven blocks of hidden states through one matrix: sliced against whole.
RNG = np.random.default_rng(1)
HIDDEN = jnp.asarray(RNG.standard_normal((2, 7, 4, 6)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, 9, (2, 7, 4)))
WEIGHTS = jnp.asarray(RNG.random((2, 7, 4)) < 0.7, jnp.float32).at[0, 3].set(0.0)
MATRIX = jnp.asarray(RNG.standard_normal((6, 9)), jnp.float32)
CHOICES = {
    "decay": Loss(gamma=4.0),
    "dpace": Loss(dpace_alpha=0.4),
}


SHARE = 0.35  # λ


def toy_outputs(matrix, rows, states):
    base = rows @ matrix
    return losses.Outputs(base, base + jnp.tanh(base), jnp.sin(states))


def whole_loss(loss):
    """(matrix, hidden rows) → (loss, metrics) in one piece."""

    def loss_of(matrix, hidden):
        outputs = toy_outputs(matrix, hidden, HIDDEN @ MATRIX)
        base, final = (x.reshape(-1, *x.shape[2:]) for x in outputs[:2])
        labels, weights = (x.reshape(-1, x.shape[-1]) for x in (LABELS, WEIGHTS))
        return dual_loss(block_sums(base, final, labels, weights, SHIFTED, loss), SHARE)

    return loss_of


def loss_in_slices(loss):
    """The same by sliced_loss."""
    labels = labelled(LABELS, WEIGHTS, SHIFTED, loss)
    loss = loss.at(SHARE, labels)

    def loss_of(matrix, hidden):
        value, sums = sliced_loss(SlicedForward(toy_outputs, matrix, (hidden,), HIDDEN @ MATRIX), labels, loss)
        return value, loss.metrics(sums)

    return loss_of


@functools.lru_cache
def measured(make, loss):
    """(loss, metrics), gradients by matrix and hidden rows."""
    run = jax.jit(jax.value_and_grad(make(loss), argnums=(0, 1), has_aux=True))
    return jax.device_get(run(MATRIX, HIDDEN))


@pytest.mark.parametrize("size", [1, 3, 6, 1000])
@pytest.mark.parametrize("kind", CHOICES)
def test_slices_agree_with_the_whole_in_loss_metrics_and_gradients(kind, size):
    (loss, metrics), gradients = measured(loss_in_slices, dataclasses.replace(CHOICES[kind], slice_blocks=size))
    (whole, whole_metrics), whole_gradients = measured(whole_loss, CHOICES[kind])
    np.testing.assert_allclose(loss, whole, rtol=1e-6)
    for name in METRICS:
        np.testing.assert_allclose(metrics[name], whole_metrics[name], rtol=1e-6, err_msg=name)
    for ours, expected in zip(gradients, whole_gradients, strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-6)
    assert abs(whole_gradients[0]).max() > 1e-3
