"""Training blocks: anchors, block tokens, labels, weights, decay. Literal inputs and outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method import blocks

sample_anchors = jax.jit(blocks.sample_anchors, static_argnums=3)

ROW = jnp.array([[10, 11, 12, 13, 14, 15, 16, 17]])


def mask_of(text):
    """'0110' → float32 [1, 4]."""
    return jnp.array([[float(cell) for cell in text]])


def as_text(row):
    return "".join(str(int(cell)) for cell in row)


def labels_at(anchors, mask="11111111", keep=None, first_slot=0, contiguous=True):
    """labels of row 0 as lists, and the raw weights as texts."""
    anchors = jnp.array([anchors])
    keep = jnp.ones(anchors.shape, bool) if keep is None else jnp.array([keep])
    choices = {"block_size": 4, "first_slot": first_slot, "contiguous": contiguous}
    labels, weights = blocks.labels_and_mask(ROW, mask_of(mask), anchors, keep, **choices)
    return labels[0].tolist(), [as_text(row) for row in weights[0]]


@pytest.mark.parametrize(
    "mask, legal",
    [
        ("011101", "011000"),
        ("111111", "111110"),
        ("000000", "000000"),
        ("101010", "000000"),
        ("000011", "000010"),
        ("100001", "000000"),  # the row does not wrap around
    ],
)
def test_an_anchor_and_the_token_after_it_are_supervised(mask, legal):
    assert as_text(blocks.legal_anchors(mask_of(mask))[0]) == legal


def test_a_row_draws_the_same_anchors_whatever_the_batch_and_the_padding():
    mask = jnp.ones((4, 40)).at[:, 4].set(0.0)
    rows, key = jnp.array([7, 3, 12, 5]), jax.random.key(0)
    batched, keep = sample_anchors(key, mask, rows, 6)
    assert keep.all()
    assert batched[::-1].tolist() == sample_anchors(key, mask, rows[::-1], 6)[0].tolist()
    for padding in (0, 7, 30):
        alone, _ = sample_anchors(key, jnp.pad(mask[:1], ((0, 0), (0, padding))), jnp.array([12]), 6)
        assert batched[2].tolist() == alone[0].tolist()


def test_anchors_are_legal_distinct_and_ascending():
    mask = jnp.asarray(np.random.default_rng(0).random((5, 60)) < 0.8, jnp.float32)
    anchors, keep = sample_anchors(jax.random.key(0), mask, jnp.arange(5), 12)
    legal = np.asarray(blocks.legal_anchors(mask))
    assert keep.all()
    for row, drawn in enumerate(np.asarray(anchors)):
        assert legal[row, drawn].all()
        assert (np.diff(drawn) > 0).all()


@pytest.mark.parametrize(
    ("mask", "count", "anchors", "kept"),
    [
        ("01110011", 5, [1, 2, 6, 0, 0], 3),  # too few legal positions: dropped zeros at the end
        ("1101", 5, [0, 0, 0], 1),  # no more slots than positions with a token after them
        ("0100100", 3, [0, 0, 0], 0),  # no legal position
    ],
)
def test_a_row_with_few_legal_positions_fills_up_with_dropped_zeros(mask, count, anchors, kept):
    drawn, keep = sample_anchors(jax.random.key(0), mask_of(mask), jnp.array([0]), count)
    assert (drawn.tolist(), keep.tolist()) == ([anchors], [[True] * kept + [False] * (len(anchors) - kept)])


def test_every_legal_anchor_is_drawn_equally_often():
    """8 legal positions, 2 drawn per row, 4000 rows: 1000 ± 5 standard deviations (27) each."""
    mask = jnp.broadcast_to(mask_of("0111111111"), (4000, 10))
    anchors, _ = sample_anchors(jax.random.key(0), mask, jnp.arange(4000), 2)
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=10)
    assert counts[[0, 9]].tolist() == [0, 0]
    assert abs(counts[1:9] - 1000).max() < 5 * 27.4


def test_block_tokens_are_the_anchor_and_masks_and_masks_alone_for_a_dropped_block():
    out = blocks.block_tokens(ROW, jnp.array([[2, 0]]), jnp.array([[True, False]]), 4, 99)
    assert out.tolist() == [[[12, 99, 99, 99], [99, 99, 99, 99]]]


LABELS = [
    pytest.param([1], {}, [[12, 13, 14, 15]], ["1111"], id="shifted: from one after the anchor on"),
    pytest.param(
        [1], {"first_slot": 1}, [[11, 12, 13, 14]], ["0111"], id="unshifted: from the anchor on, without weight"
    ),
    pytest.param([5], {}, [[16, 17, 17, 17]], ["1100"], id="past the row: clamped, without weight"),
    pytest.param([6], {}, [[17] * 4], ["1000"], id="the last anchor has exactly one label, shifted"),
    pytest.param([6], {"first_slot": 1}, [[16, 17, 17, 17]], ["0100"], id="and unshifted"),
    pytest.param([1], {"mask": "01101111"}, [[12, 13, 14, 15]], ["1000"], id="cut at a gap, shifted"),
    pytest.param([1], {"mask": "01101111", "first_slot": 1}, [[11, 12, 13, 14]], ["0100"], id="and unshifted"),
    # Slot 0 is the anchor itself and has no label, so its mask does not matter.
    pytest.param([1], {"mask": "00111111", "first_slot": 1}, [[11, 12, 13, 14]], ["0111"], id="an unsupervised anchor"),
    pytest.param([2, 0], {"keep": [True, False]}, [[13, 14, 15, 16], [11, 12, 13, 14]], ["1111", "0000"], id="dropped"),
]
UNCUT = [
    pytest.param([1], {"mask": "01101111"}, ["1011"], id="goes on after a gap, shifted"),
    pytest.param([1], {"mask": "01101111", "first_slot": 1}, ["0101"], id="and unshifted"),
    pytest.param([6], {"first_slot": 1}, ["0100"], id="the last anchor"),
    pytest.param([2, 0], {"keep": [True, False]}, ["1111", "0000"], id="dropped"),
]


@pytest.mark.parametrize(("anchors", "choices", "labels", "weights"), LABELS)
def test_contiguous_labels_and_their_weights(anchors, choices, labels, weights):
    assert labels_at(anchors, **choices) == (labels, weights)


@pytest.mark.parametrize(("anchors", "choices", "weights"), UNCUT)
def test_weights_of_labels_that_are_not_cut(anchors, choices, weights):
    assert labels_at(anchors, contiguous=False, **choices)[1] == weights


def test_decay_starts_at_the_first_slot_that_predicts():
    shifted, unshifted = (np.asarray(blocks.position_decay(16, first, 7.0)) for first in (0, 1))
    np.testing.assert_allclose(shifted[[0, 1, 15]], [1.0, 0.866878, 0.117319], rtol=1e-5)
    np.testing.assert_allclose(unshifted[[1, 2, 15]], [1.0, 0.866878, 0.135335], rtol=1e-5)


def test_head_consumes_the_tokens_from_the_anchor_on_clamped_to_the_row():
    assert blocks.head_tokens(ROW, jnp.array([[1, 6]]), 4).tolist() == [[[11, 12, 13, 14], [16, 17, 17, 17]]]


def test_a_head_may_read_the_token_before_the_anchor_where_its_document_has_one():
    """At the first token of a document the anchor itself takes that place."""
    anchors, positions = jnp.array([[0, 1, 3]]), jnp.array([[0, 1, 2, 0, 1, 2, 3, 4]])
    assert blocks.head_tokens(ROW, anchors, 2, 1).tolist() == [[[10, 10, 11], [10, 11, 12], [12, 13, 14]]]
    assert blocks.head_tokens(ROW, anchors, 2, 1, positions).tolist() == [[[10, 10, 11], [10, 11, 12], [13, 13, 14]]]
    assert blocks.head_tokens(ROW, anchors, 2, 0, positions).tolist() == [[[10, 11], [11, 12], [13, 14]]]
