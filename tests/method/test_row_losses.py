"""What EAGLE-3 and Medusa learn from every row: labels, packed rows and slices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import row_losses
from domino_jax.method.heads.eagle3_model import Eagle3Settings
from domino_jax.method.heads.medusa import MedusaConfig, MedusaSettings
from domino_jax.method.row_losses import row_loss
from domino_jax.method.step import target_pass
from tests.helpers.decoding_models import random_models
from tests.helpers.models import row_gradients
from tests.helpers.packing import packed_row, separate_rows

HEADS = ("eagle3", "medusa")
SETTINGS = {"eagle3": Eagle3Settings(passes=3), "medusa": MedusaSettings()}


# --------------------------------------------------------------------------------------------------------- labels


ROW = {"tokens": jnp.array([[10, 11, 12, 13, 14, 15]]), "loss_mask": jnp.array([[0, 0, 1, 1, 0, 1.0]])}


def test_head_i_is_labelled_by_the_token_two_and_i_places_later():
    ids, weights, _ = MedusaSettings().labels(MedusaConfig(8, 20, 3), ROW)
    assert ids[0].T.tolist() == [[12, 13, 14, 15, 0, 0], [13, 14, 15, 0, 0, 0], [14, 15, 0, 0, 0, 0]]
    assert weights[0].T.tolist() == [[1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]


def test_a_medusa_label_is_of_the_rows_document():
    documents = {"documents": jnp.array([[1, 1, 1, 1, 2, 2]])}
    weights = MedusaSettings().labels(MedusaConfig(8, 20, 2), ROW | documents).label_weights
    assert weights[0].T.tolist() == [[1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def places(passes, **changes) -> list[list[tuple[int, int]]]:
    """For each pass the rows that count, as (row, token that they predict)."""
    ids, weights, _ = Eagle3Settings(passes).labels(None, ROW | changes)
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
    weights = Eagle3Settings(1).labels(None, padded).label_weights
    assert weights[0, :, 0].tolist() == [0, 1, 1, 0, 0, 0]


def test_row_teacher_and_label_are_in_one_document():
    documents = {"documents": jnp.array([[1, 1, 1, 2, 2, 2]]), "loss_mask": jnp.ones((1, 6))}
    assert places(2, **documents) == [[(0, 2), (3, 5)], []]


# --------------------------------------------------------------------------------------------------- packed rows


@functools.lru_cache
def measured(head: str, together: bool = False):
    """(loss, metrics, gradients) of the rows apart or together; without the number of positions of the batch."""
    rows = separate_rows(62)
    models, batch = random_models(head=head), packed_row(rows) if together else rows
    loss, metrics, gradients = row_gradients(models, batch, SETTINGS[head])
    share = batch["tokens"].size if head == "eagle3" else 1.0
    return loss * share, metrics, jax.tree.map(lambda leaf: leaf * share, gradients)


@pytest.mark.parametrize("head", HEADS)
def test_loss_and_gradients_of_a_packed_row_are_those_of_its_rows(head):
    (loss, metrics, gradients), (other, others, theirs) = (measured(head, packed) for packed in (False, True))
    assert loss > 1.0
    np.testing.assert_allclose(other, loss, rtol=1e-5)
    for name in set(metrics) - {name for name in metrics if name.startswith("loss") and head == "eagle3"}:
        np.testing.assert_allclose(others[name], metrics[name], rtol=1e-5, err_msg=name)
    for one, two in zip(jax.tree.leaves(gradients), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_slices_of_the_logits_change_nothing(head, monkeypatch):
    whole = measured(head)
    measured.cache_clear()
    monkeypatch.setattr(row_losses, "SLICE_LOGITS", 20)
    sliced = measured(head)
    measured.cache_clear()
    np.testing.assert_allclose(sliced[0], whole[0], rtol=1e-6)
    for one, two in zip(jax.tree.leaves(whole[2]), jax.tree.leaves(sliced[2]), strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-6)


def test_a_head_without_labels_gives_zero_and_no_nan():
    models = random_models(head="medusa")
    batch = {"tokens": jnp.ones((1, 4), jnp.int32), "loss_mask": jnp.zeros((1, 4)).at[0, 2].set(1.0)}
    labels = MedusaSettings().labels(models.drafter.config, batch)
    objective = MedusaSettings().objective(models.drafter.config, labels)
    _, hidden = target_pass(models.target, models.target_params, batch, (), True)
    loss, sums = row_loss(models, None, batch, labels, objective, hidden)
    metrics = objective.metrics(sums)
    assert np.isfinite(loss) and metrics["loss_1"] > 0
    assert [float(metrics[f"loss_{head}"]) for head in (2, 3, 4)] == [0.0, 0.0, 0.0]
