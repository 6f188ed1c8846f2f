"""A packed row has the labels, losses and gradients of its rows, and nothing crosses a border."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import blocks
from domino_jax.method.losses import Loss
from domino_jax.method.pair import Pair
from domino_jax.method.step import label_blocks, target_pass
from domino_jax.models import attention, slices
from domino_jax.models.attention import attend, attend_causal, attend_row, causal_mask
from tests.helpers.models import loss_and_metrics, tiny_drafter, tiny_target
from tests.helpers.packing import LENGTHS, packed_row, separate_rows

ANCHORS = ((3, 9), (2, 6))  # 9 of the first row: its block runs over the border


@functools.lru_cache
def models(shift):
    target = tiny_target(tied=False)
    return target, tiny_drafter(target.config, shift, 1, layers=1)


@functools.lru_cache
def jitted(shift):
    """(drafter parameters, batch, anchors) → ((loss, metrics), gradients); compiled once for each batch shape."""
    target, drafter = models(shift)
    loss = Loss(gamma=4.0, contiguous=False)

    @jax.jit
    def run(params, batch, anchors):
        features, _ = target_pass(target.module, target.params, batch, drafter.config.target_layer_ids)
        drawn = label_blocks(batch, anchors, jnp.ones(anchors.shape, bool), drafter.config, loss)

        def loss_of(params):
            models = Pair(target.module, target.params, drafter.module, params)
            return loss_and_metrics(models, features, batch, drawn, loss, 0.3)

        return jax.value_and_grad(loss_of, has_aux=True)(params)

    return run


def measured(shift, batch, anchors):
    """((loss, metrics), gradients) of the drafter on a batch with given anchors."""
    run = jitted(shift)
    return jax.device_get(run(models(shift)[1].params, batch, jnp.asarray(anchors)))


def agree(shift):
    apart = measured(shift, separate_rows(), ANCHORS)
    first = LENGTHS[0]
    together = measured(shift, packed_row(separate_rows()), [[*ANCHORS[0], *(first + a for a in ANCHORS[1])]])
    for name in apart[0][1]:
        np.testing.assert_allclose(together[0][1][name], apart[0][1][name], rtol=1e-5, err_msg=name)
    for ours, plain in zip(jax.tree.leaves(together[1]), jax.tree.leaves(apart[1]), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)
    return apart


def test_loss_and_gradients_of_a_packed_row_are_those_of_its_rows():
    (loss, _), gradients = agree(True)
    assert loss > 1.0 and max(abs(leaf).max() for leaf in jax.tree.leaves(gradients)) > 1e-2


def test_the_same_unshifted_and_with_attention_in_slices(monkeypatch):
    monkeypatch.setattr(slices, "BLOCKS", 3)
    agree(False)


def test_a_packed_row_with_room_for_all_draws_the_anchors_that_its_rows_draw():
    plain, together = separate_rows(), packed_row(separate_rows())
    ids = jnp.array([5, 9])
    apart, kept = blocks.sample_anchors(jax.random.key(0), plain["loss_mask"], ids, 99)
    drawn, keep = blocks.sample_anchors(jax.random.key(0), together["loss_mask"], ids[:1], 99, together["documents"])
    starts = jnp.array([[0], [LENGTHS[0]]])
    assert drawn[keep].tolist() == (apart + starts)[kept].tolist() and keep.sum() == LENGTHS[0] + LENGTHS[1] - 4


def draw(length, heads=4, kv=2, width=8):
    rng = np.random.default_rng(5)
    shapes = ((2, heads, length, width), (2, kv, length, width), (2, kv, length, width))
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True])
def test_causal_attention_in_slices_equals_one_dense_mask(packed, monkeypatch):
    """21 rows in slices of 8, the last one short; in parts of 4 with three slices of 2, the last one short."""
    q, k, v = draw(21)
    documents = jnp.asarray([[1] * 9 + [2] * 12, [1] * 21], jnp.int32) if packed else None
    dense = attend(q, k, v, causal_mask(jnp.arange(21), 21, documents, documents))
    np.testing.assert_allclose(attend_causal(q, k, v, documents, slice_rows=8), dense, atol=1e-6)
    for rows, parts in ((8, 8), (2, 4)):
        monkeypatch.setattr(attention, "PART_ROWS", rows)
        monkeypatch.setattr(attention, "ROW_PARTS", parts)
        np.testing.assert_allclose(attend_row(q, k, v, documents), dense, atol=1e-6)
