"""Heads cut to a smaller rank: in a block of a training the same drafter as one that was cut for good."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.kinds import new_drafter
from domino_jax.method.ranks import cut_head, kept_ranks, rank_axes, sample_ranks, with_head_rank
from domino_jax.runtime.errors import DominoError
from domino_jax.weights.drafter import drafter_table, load_drafter, save_drafter
from tests.helpers.decoding_models import random_models
from tests.helpers.models import random_tokens, tiny_drafter, tiny_target

RANK, CUT = 6, 4
CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}
KINDS = {
    "domino": {},
    "vanilla": {"head": "markov", "markov_head_type": "vanilla"},
    "gated": {"head": "markov", "markov_head_type": "gated", **CONFIDENT},
    "rnn": {"head": "markov", "markov_head_type": "rnn", **CONFIDENT},
    "dflash2": {"head": "dflash2", "shift_label": False},
    "xpress": {"head": "xpress", "shift_label": True, "block_size": 3},
}


@functools.lru_cache
def drafter(kind):
    return tiny_drafter(tiny_target().config, layers=1, **KINDS[kind])


def apply(config, params, method, *inputs):
    head = config.head_module(jnp.float32, whole=False)
    return head.apply({"params": params["head"]}, *inputs, method=method)


def slots(config, blocks=3):
    """z [3, 3, 32] and what the head reads of the tokens before the slots."""
    rng = np.random.default_rng(0)
    z, read = (jnp.asarray(rng.standard_normal((blocks, 3, 32), dtype=np.float32)) for _ in range(2))
    return z, read if config.reads_embeddings else random_tokens((blocks, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_cut_to_a_rank_has_the_codes_of_the_head_of_that_rank(kind):
    """With the other blocks of the batch at their own ranks; numbers past the rank are zero."""
    config, _, params = drafter(kind)
    smaller, cut = cut_head(config, params, CUT)
    z, x = slots(config)
    kept = kept_ranks(jnp.array([CUT, RANK, CUT]), RANK)
    found = apply(config, params, "codes", z, x, kept[:, None])
    for block, (one, weights) in enumerate([(smaller, cut), (config, params), (smaller, cut)]):
        expected = apply(one, weights, "codes", z, x)[block]
        assert expected.shape == (3, one.head_rank)
        np.testing.assert_allclose(found[block, :, : one.head_rank], expected, atol=1e-6)
        assert not np.asarray(found[block, :, one.head_rank :]).any()
        change = apply(one, weights, "residual", expected)
        np.testing.assert_allclose(apply(config, params, "residual", found[block]), change, atol=1e-5)
    whole = apply(config, params, "codes", z, x)
    assert np.abs(found[0] - whole[0]).max() > 0.01
    np.testing.assert_array_equal(apply(config, params, "codes", z, x, kept[1:2, None]), whole)
    if kind in ("gated", "rnn"):
        cut_sure = apply(config, params, "confidence", z, x, kept[:, None])
        np.testing.assert_allclose(cut_sure[0], apply(smaller, cut, "confidence", z, x)[0], atol=1e-6)
        assert (cut_sure[0] != apply(config, params, "confidence", z, x)[0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_drafter_is_one_of_its_config_and_a_legal_folder(kind, tmp_path):
    """Also where an rnn's rank is a part in the middle of an axis."""
    config, _, params = drafter(kind)
    smaller, cut = cut_head(config, jax.device_get(params), CUT)
    shapes = jax.eval_shape(lambda: init_drafter_params(new_drafter(smaller), jax.random.key(0)))
    assert jax.tree.map(lambda leaf: leaf.shape, cut) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    save_drafter(tmp_path, smaller, cut, "float32")
    read_config, read = load_drafter(tmp_path, tiny_target().config, "float32")
    assert read_config.to_dict() == smaller.to_dict() and read_config.head_rank == CUT
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(read), cut)
    assert cut_head(config, params, 0)[1] is params and cut_head(config, params, RANK)[0] is config


@pytest.mark.parametrize("kind", KINDS)
def test_every_axis_of_the_rank_is_cut(kind):
    """The shapes of the head's tensors that change with the rank are those of the table, and no other."""
    config = drafter(kind).config
    entries = zip(drafter_table(config), drafter_table(with_head_rank(config, CUT)), strict=True)
    changed = {entry.path[1:] for entry, other in entries if entry.shape != other.shape}
    assert changed == set(rank_axes(config))


def test_a_row_draws_the_same_ranks_in_any_batch_and_all_of_them():
    draw = jax.jit(sample_ranks, static_argnums=(2, 3))
    key, ranks, alone = jax.random.key(3), (2, 4, 8), jnp.array([9])
    drawn = np.asarray(draw(key, jnp.array([5, 9, 2]), 300, ranks))
    np.testing.assert_array_equal(draw(key, alone, 300, ranks)[0], drawn[1])
    np.testing.assert_array_equal(draw(key, alone, 100, ranks)[0], drawn[1, :100])
    assert (drawn[0] != drawn[1]).any()
    assert (np.asarray(draw(jax.random.key(4), alone, 300, ranks)[0]) != drawn[1]).any()
    for rank in ranks:
        assert 70 < (drawn[0] == rank).sum() < 130
    twice = np.asarray(draw(key, alone, 300, (2, 4, 4)))
    assert 170 < (twice == 4).sum() < 230  # a rank that is named twice is drawn twice as often


@pytest.mark.parametrize(
    ("config", "rank", "message"),
    [
        (lambda: drafter("domino").config, 7, "is 7, but this drafter's head has rank 6; give at most that"),
        (lambda: drafter("domino").config, -1, "is -1, but this drafter's head has rank 6"),
        (lambda: tiny_drafter(tiny_target().config, head="none").config, 2, "is 2, but this drafter .none. has no"),
        (lambda: random_models(head="eagle3").drafter.config, 2, "is 2, but this drafter .eagle3. has no head"),
    ],
)
def test_a_rank_that_the_head_does_not_have_is_refused(config, rank, message):
    with pytest.raises(DominoError, match=f"^decode.head_rank {message}") as refused:
        with_head_rank(config(), rank)
    assert refused.value.exit_code == 2
    assert with_head_rank(config(), 0) == config()
