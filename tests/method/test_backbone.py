"""The draft backbone: what a block may read, and that training and decoding see the same thing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.backbone import slots_read, training_attention
from tests.helpers.models import random_tokens, run_blocks, tiny_drafter, tiny_target


def weights_picture(anchors, keep, block_size, length, window, causal=False):
    """Which keys training_attention reads, as 0/1 lines over [context; all block rows], one line per query.

    Values are one-hot, so the output is the row of softmax weights itself.
    """
    rows = len(anchors) * block_size
    keys = length + rows
    zeros, onehot = jnp.zeros((1, 1, keys, keys)), jnp.eye(keys)[None, None]

    @jax.jit
    def attended():
        context = (zeros[:, :, :length], onehot[:, :, :length])
        readable = slots_read(block_size, window, causal)
        attention = training_attention(context, jnp.array([anchors]), jnp.array([keep]), readable, window)
        return attention(zeros[:, :, length:], zeros[:, :, length:], onehot[:, :, length:])[0]

    out = np.asarray(attended())
    lines = ["".join("1" if weight > 0 else "0" for weight in row) for row in out[0, 0]]
    return [f"{line[:length]} {line[length:]}" for line in lines]


def test_a_block_reads_the_context_before_its_anchor_and_all_of_itself():
    assert weights_picture([2, 4], [True, True], 3, 6, None) == [
        "110000 111000",
        "110000 111000",
        "110000 111000",
        "111100 000111",
        "111100 000111",
        "111100 000111",
    ]


def test_a_sliding_layer_reads_a_window_of_context_and_no_later_slot():
    assert weights_picture([2, 4], [True, True], 3, 6, 3, causal=True) == [
        "110000 100000",
        "010000 110000",
        "000000 111000",
        "001100 000100",
        "000100 000110",
        "000000 000111",
    ]


def test_a_block_without_keep_reads_nothing():
    assert weights_picture([2, 0], [True, False], 2, 3, None) == ["110 1100", "110 1100", "000 0000", "000 0000"]


# Causality: two rows of 16 tokens, blocks of 4 at 5 and 9.
ANCHORS = jnp.array([[5, 9], [5, 9]])


@functools.lru_cache
def models(layer_types=(), window=None, shift_label=True):
    target = tiny_target(tied=False)  # a tied one would predict the mask token in every masked slot
    return target, tiny_drafter(target.config, shift_label, 1, layer_types=layer_types, sliding_window=window)


def block_hidden(tokens, anchors=ANCHORS, keep=None):
    return run_blocks(*models(), tokens, anchors, keep)["z"]


@pytest.mark.parametrize("position", [10, 11, 12, 15])
def test_z_of_a_block_ignores_a_token_after_its_anchor(position):
    tokens = random_tokens((2, 16))
    changed = tokens.at[:, position].add(1)
    assert (block_hidden(tokens) == block_hidden(changed)).all()


def test_another_blocks_anchor_does_not_matter():
    tokens = random_tokens((2, 16))
    moved = block_hidden(tokens, jnp.array([[5, 12], [5, 2]]))
    assert (block_hidden(tokens)[:, 0] == moved[:, 0]).all()
    assert (block_hidden(tokens)[:, 1] != moved[:, 1]).any()


def test_a_dropped_block_leaves_the_others_and_stays_finite():
    tokens = random_tokens((2, 16))
    dropped = block_hidden(tokens, ANCHORS, jnp.array([[True, False], [True, False]]))
    assert (block_hidden(tokens)[:, 0] == dropped[:, 0]).all()
    assert np.isfinite(dropped).all()
