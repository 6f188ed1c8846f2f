"""The training-time test: a head that reads its own greedy drafts, against the plain definition of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import blocks, step
from domino_jax.method.losses import Loss
from domino_jax.method.pair import Pair
from domino_jax.method.rollout import greedy_tokens
from domino_jax.method.step import correct_logits, label_blocks, target_pass
from tests.helpers.models import loss_and_metrics, random_tokens, run_blocks, tiny_drafter, tiny_target

pytestmark = pytest.mark.long

ROWS, LENGTH = 2, 16
ANCHORS = jnp.array([[1, 4, 9], [0, 5, 12]])
TOKENS = random_tokens((ROWS, LENGTH), seed=3)
KINDS = {
    "domino": {"head": "domino"},
    "domino, unshifted": {"head": "domino", "shift_label": False},
    "markov rnn": {"head": "markov", "markov_head_type": "rnn"},
}


def pair(kind):
    target = tiny_target(tied=False)
    return target, tiny_drafter(target.config, **KINDS[kind])


def models_of(target, drafter):
    return Pair(target.module, target.params, drafter.module, drafter.params)


def plainly_drafted(models, z):
    """[B, A, M]: slot by slot, each with the teacher-forced pass over the tokens drafted so far."""
    config = models.drafter.config
    base = models.unembed(z)
    first = jnp.take_along_axis(TOKENS, ANCHORS, axis=1)
    tokens = [first]
    for slot in range(config.num_drafts - 1):
        rest = [first] * (config.num_drafts - len(tokens))  # not read by the slots up to this one
        codes = models.bound.codes(z, models.head_inputs(jnp.stack([*tokens, *rest], axis=-1)))
        final = correct_logits(models.drafter, models.drafter_params, base, codes)
        tokens.append(jnp.argmax(final[:, :, config.first_slot + slot], axis=-1))
    return np.stack(tokens, axis=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_reads_the_drafts_of_the_plain_definition(kind):
    target, drafter = pair(kind)
    models = models_of(target, drafter)
    z = jnp.asarray(run_blocks(target, drafter, TOKENS, ANCHORS)["z"])
    expected = plainly_drafted(models, z)
    first = jnp.take_along_axis(TOKENS, ANCHORS, axis=1)
    for size in (2, 9):  # the last slice filled up, all at once
        found = greedy_tokens(models, z[:, :, drafter.config.first_slot :], first, models.unembed, size)
        np.testing.assert_array_equal(found, expected)
    text = blocks.head_tokens(TOKENS, ANCHORS, drafter.config.num_drafts)
    assert (np.asarray(text) != expected).any()


def losses(kind, loss):
    """(loss, gradients) of one batch, through the training step's loss."""
    target, drafter = pair(kind)
    models = models_of(target, drafter)
    batch = {"tokens": TOKENS, "loss_mask": jnp.ones((ROWS, LENGTH)), "row_ids": jnp.arange(ROWS)}
    features, _ = target_pass(target.module, target.params, batch, drafter.config.target_layer_ids)
    drawn = label_blocks(batch, ANCHORS, jnp.ones(ANCHORS.shape, bool), drafter.config, loss)

    def loss_of(params):
        trained = models.replace(drafter_params=params)
        return loss_and_metrics(trained, features, batch, drawn, loss, jnp.float32(0.25))[0]

    return jax.jit(jax.value_and_grad(loss_of))(drafter.params)


def test_the_loss_and_its_gradients_are_those_of_the_drafted_tokens(monkeypatch):
    loss = Loss(gamma=4.0, slice_blocks=2)
    target, drafter = pair("domino")
    z = jnp.asarray(run_blocks(target, drafter, TOKENS, ANCHORS)["z"])
    drafts = jnp.asarray(plainly_drafted(models_of(target, drafter), z))
    found = losses("domino", dataclasses.replace(loss, drafted_tokens=True))
    assert float(found[0]) != float(losses("domino", loss)[0])
    monkeypatch.setattr(step, "head_tokens", lambda *_: drafts)
    expected = losses("domino", loss)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_no_gradient_enters_a_frozen_backbone_and_the_heads_is_as_before():
    loss = Loss(gamma=4.0, slice_blocks=2)
    (value, free), (same, frozen) = (
        losses("domino", dataclasses.replace(loss, frozen_backbone=flag)) for flag in (False, True)
    )
    assert float(value) == float(same)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(frozen["backbone"]))
    assert any(np.asarray(leaf).any() for leaf in jax.tree.leaves(free["backbone"]))
    for one, other in zip(jax.tree.leaves(free["head"]), jax.tree.leaves(frozen["head"]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
