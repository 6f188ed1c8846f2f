"""λ, the learning rate and the optimizer against their tables and against arithmetic done by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from domino_jax.method.curriculum import lambda_base
from domino_jax.method.optimizer import learning_rate, make_optimizer


@pytest.mark.parametrize(
    ("total", "ratio", "expected"),
    [
        (1000, 1.0, {0: 1.0, 250: 0.75, 999: 0.001, 1000: 0.0, 5000: 0.0}),
        (1000, 0.5, {0: 1.0, 250: 0.5, 500: 0.0, 999: 0.0}),
        (1000, float("inf"), {999: 1.0}),  # stays
        (10, 0.0, {0: 1.0, 1: 0.0}),  # no span
        (10, 0.05, {0: 1.0, 1: 0.0}),  # below one step
        (5, 0.5, {0: 1.0, 1: 0.5, 2: 0.0}),  # rounded down to two
    ],
)
def test_lambda_falls_to_zero_over_a_share_of_the_steps(total, ratio, expected):
    for start in (1.0, 0.5):
        ours = [lambda_base(jnp.int32(step), total, start, ratio) for step in expected]
        np.testing.assert_allclose(ours, start * np.array([*expected.values()]), rtol=1e-4, atol=1e-7)


def test_learning_rate_warms_up_over_4_percent_and_falls_as_a_cosine():
    """Step 0 is not zero: it trains. Without a whole step of warm-up the rate starts at its peak."""
    shares = {0: 1 / 40, 19: 20 / 40, 39: 1.0, 40: 1.0, 40 + 480: 0.5, 280: 0.5 * (1 + np.cos(np.pi / 4)), 1000: 0.0}
    schedule, short = learning_rate(6e-4, 1000, 0.04), learning_rate(6e-4, 20, 0.04)
    rates = [float(schedule(step)) for step in shares]
    np.testing.assert_allclose(rates, 6e-4 * np.array(list(shares.values())), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose([float(short(0)), float(short(10))], [6e-4, 3e-4], rtol=1e-5)


def test_optimizer_clips_by_the_norm_over_all_tensors_then_runs_adam():
    """Two tensors from zeros, at learning rates 0.1, 0.2, … as the step multiplies them in, against numpy."""
    gradients = [(3.0, -4.0), (0.3, 0.4), (30.0, 1.0)]
    optimizer, params = make_optimizer("adamw"), {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    state, expected, m, v = optimizer.init(params), np.zeros(2), np.zeros(2), np.zeros(2)
    for step, gradient in enumerate(np.array(gradients), start=1):
        tree = {"a": jnp.asarray(gradient[:1]), "b": jnp.asarray(gradient[1:])}
        updates, state = optimizer.update(tree, state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda update, rate=0.1 * step: rate * update, updates))
        gradient = gradient * min(1.0, 1.0 / np.linalg.norm(gradient))
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        expected -= 0.1 * step * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    np.testing.assert_allclose([params["a"][0], params["b"][0]], expected, rtol=1e-4)


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
