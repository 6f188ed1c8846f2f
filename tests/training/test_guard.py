"""Steps that are not finite, and the average of the weights, at the jitted step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.curriculum import lambda_base
from domino_jax.method.losses import Loss
from domino_jax.method.optimizer import learning_rate, make_optimizer
from domino_jax.method.state import init_state
from domino_jax.method.step import make_train_step
from domino_jax.runtime.errors import NonFiniteError
from domino_jax.training.non_finite import NonFiniteGuard
from tests.helpers.models import random_tokens, tiny_drafter, tiny_target

POISON = 7  # a token whose embedding is not a number


SCHEDULE = learning_rate(1e-2, 20, 0.1)


@functools.lru_cache
def made(kind="adamw"):
    target = tiny_target(tied=False)
    drafter = tiny_drafter(target.config, layers=1, target_layer_ids=(0,))
    optimizer = make_optimizer(kind)
    step = make_train_step(
        target.module,
        drafter.module,
        optimizer,
        num_anchors=4,
        learning_rate=SCHEDULE,
        curriculum=lambda step: lambda_base(step, 20, 0.5, 1.0),
        loss=Loss(gamma=4.0),
        ema_decay=0.75,
    )
    return target, step, jax.jit(lambda: init_state(drafter.module, optimizer, jax.random.key(0), with_ema=True))


def batch_of(token=None):
    tokens = random_tokens((2, 16), seed=3)
    tokens = jnp.where(tokens == POISON, POISON + 1, tokens)
    if token is not None:
        tokens = tokens.at[1, 0].set(token)
    return {"tokens": tokens, "loss_mask": jnp.ones((2, 16)), "row_ids": jnp.arange(2)}


def poisoned_params(target):
    table = target.params["embed_tokens"]["embedding"].at[POISON].set(jnp.nan)
    return {**target.params, "embed_tokens": {"embedding": table}}


def test_a_poisoned_step_changes_nothing_but_the_counts():
    target, step, start = made()
    params, key = poisoned_params(target), jax.random.key(1)
    state, _ = step(start(), params, batch_of(), key)
    before = jax.device_get(state)
    state, metrics = step(state, params, batch_of(POISON), key)
    after = jax.device_get(state)
    assert not np.isfinite(metrics["loss"]) or not np.isfinite(metrics["grad_norm"])
    for name in ("params", "opt_state", "ema"):
        for one, other in zip(*map(jax.tree.leaves, (getattr(before, name), getattr(after, name))), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert (int(after.step), int(after.skipped), int(after.bad_step)) == (2, 1, 2)
    state, metrics = step(state, params, batch_of(), key)
    assert np.isfinite(metrics["loss"]) and (int(state.skipped), int(state.bad_step)) == (1, 2)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_step_stops_neither_the_learning_rate_nor_lambda(kind):
    """Twenty steps, the third poisoned: both schedules end where they would have, at the values of the last step."""
    target, step, start = made(kind=kind)
    params, key = poisoned_params(target), jax.random.key(1)
    state, rates, lambdas = start(), [], []
    for number in range(20):
        state, metrics = step(state, params, batch_of(POISON if number == 2 else None), key)
        rates.append(float(metrics["learning_rate"]))
        lambdas.append(float(metrics["lambda_base"]))
    assert (int(state.step), int(state.skipped)) == (20, 1)
    np.testing.assert_allclose(rates, [float(SCHEDULE(number)) for number in range(20)], rtol=1e-5)
    np.testing.assert_allclose(lambdas, [float(lambda_base(number, 20, 0.5, 1.0)) for number in range(20)], rtol=1e-5)


def test_the_average_follows_the_parameters():
    """average ← ¾ average + ¼ parameters, from the first parameters on."""
    target, step, start = made()
    state = start()
    average = jax.device_get(state.params)
    for _ in range(3):
        state, _ = step(state, target.params, batch_of(), jax.random.key(1))
        average = jax.tree.map(lambda mean, new: 0.75 * mean + 0.25 * new, average, jax.device_get(state.params))
    for ours, expected in zip(*map(jax.tree.leaves, (jax.device_get(state.ema), average)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-8)
    assert state.best_params is state.ema


def values(skipped, bad_step, loss=float("nan")):
    return {"skipped": float(skipped), "bad_step": float(bad_step), "loss": loss, "grad_norm": 1.0}


def test_the_guard_names_step_value_and_rows():
    guard = NonFiniteGuard(True, 0, lambda row: f"rows.jsonl:{row + 1}")
    guard.remember(4, np.array([10, 11]))
    guard.remember(5, np.array([12, 13]))
    guard.check(values(0, 0, 1.0))
    named = r"step 5: loss not finite; rows of the batch: rows.jsonl:13, rows.jsonl:14"
    with pytest.raises(NonFiniteError, match=named):
        guard.check(values(1, 5))
    NonFiniteGuard(True, 3, str).check(values(3, 40, 1.0))  # of an earlier start
    NonFiniteGuard(False, 0, str).check(values(1, 5))
