"""verify.py: one pass over a block is what the target says after every prefix, and the leading right drafts stand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import verify as verifying
from domino_jax.method.verify import accept_chain
from domino_jax.models.cache import block_mask
from tests.helpers.decoding_models import random_models

verify = jax.jit(verifying.verify, static_argnames="tap_layers")

PREFIX, BLOCK = [5, 9, 2, 60, 7], [11, 3, 40, 8]


@functools.partial(jax.jit, static_argnames="slots")
def _prefill(models, tokens, slots):
    where = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = block_mask(jnp.zeros(len(tokens), jnp.int32), jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)), slots)
    empty = models.target.init_cache(len(tokens), slots)
    return models.run_target(tokens, where, mask, empty, where, with_logits=False)["cache"]


def prefilled(models, rows=1, slots=16):
    """The target's cache after PREFIX, in so many rows."""
    return _prefill(models, jnp.array([PREFIX] * rows), slots)


@pytest.mark.parametrize(
    ("drafts", "chosen", "accepted"),
    [
        ([4, 5, 6], [4, 5, 6, 9], 3),
        ([4, 5, 6], [4, 5, 7, 9], 2),
        ([4, 5, 6], [4, 0, 6, 9], 1),
        ([4, 5, 6], [0, 5, 6, 9], 0),
        ([4, 5, 6], [0, 4, 5, 6], 0),
    ],
)
def test_accepted_is_the_leading_run_of_right_drafts(drafts, chosen, accepted):
    assert accept_chain(jnp.array([[1, *drafts]]), jnp.array([chosen])).tolist() == [accepted]


def test_verify_leaves_the_committed_rows_alone_and_writes_the_block_behind_them():
    models = random_models()
    cache = prefilled(models)
    out = verify(models, cache, jnp.array([BLOCK]), jnp.array([5]))
    for (before, _), (after, _) in zip(cache, out.cache, strict=True):
        np.testing.assert_array_equal(before[:, :, :5], after[:, :, :5])
        np.testing.assert_array_equal(before[:, :, 9:], after[:, :, 9:])
        assert (np.asarray(before[:, :, 5:9]) != np.asarray(after[:, :, 5:9])).any(axis=(0, 1, 3)).all()


def test_a_block_over_the_caches_edge_keeps_every_committed_row():
    models = random_models()
    cache = prefilled(models, slots=6)
    out = verify(models, cache, jnp.array([BLOCK]), jnp.array([5]))
    for before, after in zip(cache, out.cache, strict=True):
        np.testing.assert_array_equal(before[0][:, :, :5], after[0][:, :, :5])


def test_features_are_the_outputs_of_the_tapped_layers_in_list_order():
    models = random_models()
    cache = prefilled(models)
    out = verify(models, cache, jnp.array([BLOCK]), jnp.array([5]), tap_layers=(1, 0))
    whole = models.run_target(jnp.array([PREFIX + BLOCK]), tap_layers=(0, 1))["features"][0, 5:]
    np.testing.assert_allclose(out.features[0], np.roll(whole, 32, axis=-1), atol=2e-5)
