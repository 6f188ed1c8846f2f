"""Training with nested ranks: each block trains the head of the rank that it was cut to, in an exact step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.heads.dflash2 import SelectorSettings
from domino_jax.method.heads.markov import MarkovSettings
from domino_jax.method.heads.xpress import XpressSettings
from domino_jax.method.kinds import new_drafter
from domino_jax.method.losses import LossSettings
from domino_jax.method.optimizer import make_optimizer
from domino_jax.method.pair import Models
from domino_jax.method.ranks import cut_head, sample_ranks, with_head_rank
from domino_jax.method.state import init_state
from domino_jax.method.step import batch_gradients, label_blocks, make_train_step
from tests.helpers.models import random_tokens, tiny_drafter, tiny_target

ROWS, LENGTH = 2, 16
ANCHORS = jnp.array([[1, 4, 9], [0, 5, 11]])
RANK, CUT = 6, 2
CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}
KINDS = {
    "domino": ({}, LossSettings),
    "markov": ({"head": "markov", "markov_head_type": "gated", **CONFIDENT}, MarkovSettings),
    "dflash2": ({"head": "dflash2", "shift_label": False}, SelectorSettings),
    "xpress": ({"head": "xpress", "shift_label": False}, XpressSettings),
}


def batch():
    tokens = random_tokens((ROWS, LENGTH), seed=3)
    return {"tokens": tokens, "loss_mask": jnp.ones((ROWS, LENGTH)), "row_ids": jnp.arange(ROWS)}


@functools.lru_cache
def pair(kind):
    target = tiny_target(tied=False)
    return target, tiny_drafter(target.config, layers=1, **KINDS[kind][0])


@functools.lru_cache
def compiled(kind, cut=0):
    """Jitted (params, ranks of the blocks or None) → (loss, gradients) of one batch, of the drafter cut to `cut`."""
    target, drafter = pair(kind)
    config = with_head_rank(drafter.config, cut)
    settings = KINDS[kind][1](gamma=4.0, slice_blocks=2)

    @jax.jit
    def compute(params, ranks):
        drawn = label_blocks(batch(), ANCHORS, jnp.ones(ANCHORS.shape, bool), config, settings)
        objective = settings.objective(jnp.float32(0.25), drawn.labels.weight)
        models = Models(target.module, target.params, new_drafter(config), params)
        sums, found = batch_gradients(models, batch(), drawn._replace(ranks=ranks), objective, 1)
        return objective.loss(sums), found

    return compute


def gradients(kind, ranks):
    loss, found = compiled(kind)(pair(kind)[1].params, jnp.asarray(ranks))
    return float(loss), jax.device_get(found)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "domino")) for kind in KINDS])
def test_blocks_cut_to_a_rank_train_the_head_of_that_rank_and_leave_the_rest_alone(kind):
    loss, found = gradients(kind, np.full(ANCHORS.shape, CUT))
    config, params = pair(kind)[1].config, pair(kind)[1].params
    expected_loss, expected = compiled(kind, CUT)(cut_head(config, params, CUT)[1], None)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    within = cut_head(config, found, CUT)[1]
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6), within, expected)
    total, inside = (sum(np.abs(leaf).sum() for leaf in jax.tree.leaves(tree)) for tree in (found, within))
    np.testing.assert_allclose(total, inside, rtol=1e-6)  # so everything past the rank has gradient zero


def test_the_rows_past_the_smaller_rank_learn_from_the_whole_blocks_of_a_mixture():
    mixture = np.array([[CUT, RANK, CUT], [RANK, CUT, RANK]])
    found = [gradients("domino", ranks) for ranks in (np.full(ANCHORS.shape, CUT), mixture, mixture * 0 + RANK)]
    assert len({loss for loss, _ in found}) == 3
    tails = [np.abs(one["head"]["up"]["kernel"][CUT:]).sum() for _, one in found]
    assert tails[0] == 0.0 and tails[1] > 0.0 and tails[2] > 0.0


@functools.lru_cache
def step():
    target, drafter = pair("domino")
    return make_train_step(
        target.module,
        drafter.module,
        make_optimizer("adamw"),
        num_anchors=4,
        learning_rate=lambda step: 1e-2,
        curriculum=lambda step: 0.0,
        settings=LossSettings(gamma=4.0, rank_scales=(0.5, 1.0)),
    )


def run(steps, state):
    losses = []
    for _ in range(steps):
        state, metrics = step()(state, pair("domino")[0].params, batch(), jax.random.key(11))
        losses.append(float(metrics["loss"]))
    return jax.device_get(state), losses


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_ranks():
    start = jax.jit(lambda: init_state(pair("domino")[1].module, make_optimizer("adamw"), jax.random.key(0)))
    state, losses = run(3, start())
    halfway, _ = run(2, start())
    resumed, last = run(1, jax.device_put(halfway))
    assert last == losses[2:]
    for one, other in zip(jax.tree.leaves(resumed), jax.tree.leaves(state), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_the_ranks_of_a_step_follow_from_its_number():
    key = jax.random.key(11)
    first, second = (sample_ranks(jax.random.fold_in(key, step), jnp.arange(2), 64, (3, 6)) for step in (0, 1))
    assert (np.asarray(first) != np.asarray(second)).any()
