"""λ, the learning rate and the optimizer against their tables and against arithmetic done by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from domino_jax.method.curriculum import lambda_base
from domino_jax.method.optimizer import learning_rate, make_optimizer


@pytest.mark.parametrize(
    "ratio, step, expected",
    [
        (1.0, 0, 1.0),
        (1.0, 250, 0.75),
        (1.0, 999, 0.001),
        (1.0, 1000, 0.0),
        (1.0, 5000, 0.0),
        (0.5, 0, 1.0),
        (0.5, 250, 0.5),
        (0.5, 500, 0.0),
        (0.5, 999, 0.0),
        (float("inf"), 999, 1.0),  # stays
    ],
)
def test_lambda_over_a_thousand_steps(ratio, step, expected):
    np.testing.assert_allclose(lambda_base(jnp.int32(step), 1000, 1.0, ratio), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("total", "ratio", "expected"),
    [(10, 0.0, [1.0, 0.0, 0.0]), (10, 0.05, [1.0, 0.0, 0.0]), (5, 0.5, [1.0, 0.5, 0.0])],
    ids=["no span", "below one step", "rounded down to two"],
)
def test_lambda_over_a_span_of_few_steps(total, ratio, expected):
    assert [float(lambda_base(jnp.int32(step), total, 1.0, ratio)) for step in (0, 1, 2)] == expected


@pytest.mark.parametrize(
    "step, share",
    [
        (0, 1 / 40),  # not zero: the first step trains
        (19, 20 / 40),
        (39, 1.0),
        (40, 1.0),
        (40 + 480, 0.5),
        (40 + 240, 0.5 * (1 + np.cos(np.pi / 4))),
        (1000, 0.0),
    ],
)
def test_learning_rate_warms_up_over_4_percent_and_falls_as_a_cosine(step, share):
    schedule = learning_rate(6e-4, 1000, 0.04)
    np.testing.assert_allclose(float(schedule(step)), 6e-4 * share, rtol=1e-5, atol=1e-12)


def test_learning_rate_without_warm_up_starts_at_the_peak():
    schedule = learning_rate(6e-4, 20, 0.04)  # ⌊0.8⌋ = 0 steps
    np.testing.assert_allclose([float(schedule(0)), float(schedule(10))], [6e-4, 3e-4], rtol=1e-5)


def run_optimizer(gradients):
    """Parameters after the gradients, from zeros; learning rates 0.1, 0.2, … as the step multiplies them in."""
    optimizer = make_optimizer("adamw")
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    state = optimizer.init(params)
    for step, gradient in enumerate(gradients, start=1):
        tree = {"a": jnp.array([gradient[0]]), "b": jnp.array([gradient[1]])}
        updates, state = optimizer.update(tree, state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda update, rate=0.1 * step: rate * update, updates))
    return [float(params["a"][0]), float(params["b"][0])]


def adam_by_hand(gradients, clip_norm):
    """Global-norm clipping, then Adam with bias correction, in numpy."""
    params, m, v = np.zeros(2), np.zeros(2), np.zeros(2)
    for step, gradient in enumerate(np.array(gradients), start=1):
        gradient = gradient * min(1.0, clip_norm / np.linalg.norm(gradient))
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        params -= 0.1 * step * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return params


def test_optimizer_clips_by_the_norm_over_all_tensors_then_runs_adam():
    gradients = [(3.0, -4.0), (0.3, 0.4), (30.0, 1.0)]
    np.testing.assert_allclose(run_optimizer(gradients), adam_by_hand(gradients, 1.0), rtol=1e-4)
    assert abs(run_optimizer(gradients) - adam_by_hand(gradients, 1e9)).max() > 0.01


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_weights_do_not_decay(kind):
    params, gradient = {"a": jnp.ones((2, 2))}, {"a": jnp.zeros((2, 2))}
    optimizer = make_optimizer(kind)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    assert not np.any(updates["a"])


def test_muon_orthogonalises_hidden_matrices_and_leaves_the_output_matrix_to_adam():
    rng = np.random.default_rng(0)
    kernel = {"kernel": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32)}
    gradients = {"down": kernel, "up": kernel, "norm": {"scale": jnp.asarray(rng.standard_normal(8), jnp.float32)}}
    optimizer = make_optimizer("muon")
    updates, _ = optimizer.update(gradients, optimizer.init(gradients), gradients)
    singular = np.linalg.svd(np.asarray(updates["down"]["kernel"]), compute_uv=False)
    assert singular.max() / singular.min() < 2.0  # five Newton-Schulz steps come near to, not onto, one value
    np.testing.assert_allclose(np.sqrt(np.mean(np.square(updates["down"]["kernel"]))), 0.2, rtol=0.3)
    for name, part in (("up", "kernel"), ("norm", "scale")):  # Adam's first step: the gradient's sign, one size
        update, gradient = np.asarray(updates[name][part]), np.asarray(gradients[name][part])
        np.testing.assert_allclose(update / -np.sign(gradient), abs(update).max(), rtol=1e-4)
