"""What EAGLE-3 learns from every row: labels, packed rows and slices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.heads import eagle3_model
from domino_jax.method.heads.eagle3_model import Eagle3Loss
from domino_jax.method.step import Blocks, batch_gradients
from tests.helpers.decoding_models import random_models
from tests.helpers.packing import packed_row, separate_rows

# --------------------------------------------------------------------------------------------------------- labels


ROW = {"tokens": jnp.array([[10, 11, 12, 13, 14, 15]]), "loss_mask": jnp.array([[0, 0, 1, 1, 0, 1.0]])}


def places(passes, **changes) -> list[list[tuple[int, int]]]:
    """For each pass the rows that count, as (row, token that they predict)."""
    ids, weights, _ = Eagle3Loss(passes).labels(ROW | changes)
    found = np.argwhere(np.asarray(weights[0]).T > 0)
    for index, place in found:
        assert ids[0, place, index] == (ROW["tokens"][0, place + 1] if place < 5 else 0)
    return [[(int(s) - 1 - j, int(s) + 1) for index, s in found if index == j] for j in range(passes)]


def test_by_label_every_supervised_token_is_taught_and_no_other():
    """Tokens 2, 3 and 5 are supervised; row t predicts token t+2 in the first pass and t+3 in the second."""
    assert places(2) == [[(0, 2), (1, 3), (3, 5)], [(0, 3), (2, 5)]]


def test_the_last_token_of_a_padded_row_teaches_nothing():
    """With two places of padding the last token is 3: its state is followed by no text."""
    padded = {"tokens": ROW["tokens"].at[0, 4:].set(0), "loss_mask": jnp.array([[0, 0, 1, 1, 0, 0.0]])}
    weights = Eagle3Loss(1).labels(padded).mask
    assert weights[0, :, 0].tolist() == [0, 1, 1, 0, 0, 0]


def test_row_teacher_and_label_are_in_one_document():
    documents = {"documents": jnp.array([[1, 1, 1, 2, 2, 2]]), "loss_mask": jnp.ones((1, 6))}
    assert places(2, **documents) == [[(0, 2), (3, 5)], []]


# --------------------------------------------------------------------------------------------------- packed rows


def gradients_of(batch):
    """(loss, metrics, gradients) of three passes over a batch."""
    loss = Eagle3Loss(passes=3)
    labels = loss.labels(batch)
    loss = loss.at(0.0, labels)
    run = jax.jit(lambda models: batch_gradients(models, batch, Blocks(None, None, labels), loss))
    sums, gradients = run(random_models(head="eagle3"))
    return jax.device_get((loss.total(sums), loss.metrics(sums), gradients))


@functools.lru_cache
def measured(together: bool = False):
    """(loss, metrics, gradients) of the rows apart or together; without the number of positions of the batch."""
    rows = separate_rows(62)
    batch = packed_row(rows) if together else rows
    loss, metrics, gradients = gradients_of(batch)
    share = batch["tokens"].size
    return loss * share, metrics, jax.tree.map(lambda leaf: leaf * share, gradients)


@pytest.mark.long
def test_loss_and_gradients_of_a_packed_row_are_those_of_its_rows():
    (loss, metrics, gradients), (other, others, theirs) = (measured(packed) for packed in (False, True))
    assert loss > 1.0
    np.testing.assert_allclose(other, loss, rtol=1e-5)
    for name in [name for name in metrics if not name.startswith("loss")]:
        np.testing.assert_allclose(others[name], metrics[name], rtol=1e-5, err_msg=name)
    for one, two in zip(jax.tree.leaves(gradients), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_slices_of_the_logits_change_nothing(monkeypatch):
    whole = measured()
    monkeypatch.setattr(eagle3_model, "SLICE_LOGITS", 20)
    sliced = measured.__wrapped__()
    np.testing.assert_allclose(sliced[0], whole[0], rtol=1e-6)
    for one, two in zip(jax.tree.leaves(whole[2]), jax.tree.leaves(sliced[2]), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_a_row_without_labels_gives_zero_and_no_nan():
    batch = {"tokens": jnp.ones((1, 4), jnp.int32), "loss_mask": jnp.zeros((1, 4))}
    loss, metrics, gradients = gradients_of(batch)
    assert loss == 0.0 and all(np.isfinite(value).all() for value in jax.tree.leaves((metrics, gradients)))
