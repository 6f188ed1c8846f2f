"""verify.py: one pass over a block is what the target says after every prefix, and the leading right drafts stand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import verify as verifying
from domino_jax.method.verify import accept_chain
from domino_jax.models.cache import append, block_mask, init_cache
from tests.helpers.decoding_models import random_models, uncached

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


def test_a_block_behind_the_cache_gives_the_logits_of_an_uncached_pass():
    models = random_models()
    out = verify(models, prefilled(models), jnp.array([BLOCK]), jnp.array([5]))
    np.testing.assert_allclose(out.logits[0], uncached(models, [PREFIX + BLOCK])[0, 5:], atol=2e-5)


def test_rows_of_different_length_see_their_own_past():
    models = random_models()
    cache = prefilled(models, rows=2)
    out = verify(models, cache, jnp.array([BLOCK, BLOCK]), jnp.array([5, 3]))
    np.testing.assert_allclose(out.logits[1], uncached(models, [PREFIX[:3] + BLOCK])[0, 3:], atol=2e-5)


def test_siblings_of_a_tree_do_not_see_each_other():
    """Root 11 with children 3 and 40; 8 below 40. Depths 0 1 1 2."""
    models = random_models()
    ancestors = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    depths = jnp.array([0, 1, 1, 2])
    cache = prefilled(models)
    out = verify(models, cache, jnp.array([BLOCK]), jnp.array([5]), depths=depths, ancestors=ancestors)
    np.testing.assert_allclose(out.logits[0, 1], uncached(models, [[*PREFIX, 11, 3]])[0, -1], atol=2e-5)
    np.testing.assert_allclose(out.logits[0, 2:], uncached(models, [[*PREFIX, 11, 40, 8]])[0, -2:], atol=2e-5)


def test_verify_leaves_the_committed_rows_alone_and_writes_the_block_behind_them():
    models = random_models()
    cache = prefilled(models)
    out = verify(models, cache, jnp.array([BLOCK]), jnp.array([5]))
    for (before, _), (after, _) in zip(cache, out.cache, strict=True):
        np.testing.assert_array_equal(before[:, :, :5], after[:, :, :5])
        np.testing.assert_array_equal(before[:, :, 9:], after[:, :, 9:])
        assert (np.asarray(before[:, :, 5:9]) != np.asarray(after[:, :, 5:9])).any(axis=(0, 1, 3)).all()


def test_a_block_over_the_caches_edge_is_dropped_not_clamped():
    """dynamic_update_slice would move the start back and overwrite slots 1 and 2. All of the block is
    dropped: the Generator refuses a prompt whose last block would not fit."""
    layer = init_cache(1, 1, 4, 1, 2)[0]
    rows = jnp.arange(1.0, 7.0).reshape(1, 1, 3, 2)
    keys, _ = append(layer, rows, rows, jnp.array([[3, 4, 5]]))
    assert keys[0, 0].tolist() == [[0, 0]] * 4


def test_a_block_over_the_caches_edge_keeps_every_committed_row():
    models = random_models()
    cache = prefilled(models, slots=6)
    out = verify(models, cache, jnp.array([BLOCK]), jnp.array([5]))
    for before, after in zip(cache, out.cache, strict=True):
        np.testing.assert_array_equal(before[0][:, :, :5], after[0][:, :, :5])


def test_the_mask_of_a_block_shows_the_past_and_the_ancestors():
    mask = block_mask(jnp.array([2]), jnp.tril(jnp.ones((3, 3), bool)), 6)
    assert mask[0].astype(int).tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]


def test_features_are_the_outputs_of_the_tapped_layers_in_list_order():
    models = random_models()
    cache = prefilled(models)
    out = verify(models, cache, jnp.array([BLOCK]), jnp.array([5]), tap_layers=(1, 0))
    whole = models.run_target(jnp.array([PREFIX + BLOCK]), tap_layers=(0, 1))["features"][0, 5:]
    np.testing.assert_allclose(out.features[0], np.roll(whole, 32, axis=-1), atol=2e-5)
