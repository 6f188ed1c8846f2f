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


def labels_at(anchors, mask="11111111", *, first_slot=0, contiguous=True, keep=None, size=4):
    """labels and raw weights of row 0 as lists of lists."""
    anchors = jnp.array([anchors])
    keep = jnp.ones(anchors.shape, bool) if keep is None else jnp.array([keep])
    labels, weights = blocks.labels_and_weights(
        ROW, mask_of(mask), anchors, keep, block_size=size, first_slot=first_slot, contiguous=contiguous
    )
    return labels[0].tolist(), weights[0].tolist()


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


@pytest.mark.parametrize("padding", [1, 7, 30])
def test_padding_longer_changes_no_drawn_anchor(padding):
    mask = jnp.ones((2, 21)).at[:, 4].set(0.0)
    padded = jnp.pad(mask, ((0, 0), (0, padding)))
    key, rows = jax.random.key(3), jnp.array([5, 9])
    drawn, keep = sample_anchors(key, mask, rows, 6)
    drawn_padded, keep_padded = sample_anchors(key, padded, rows, 6)
    assert drawn.tolist() == drawn_padded.tolist()
    assert keep.all() and keep_padded.all()


def test_a_row_draws_the_same_anchors_whatever_the_batch():
    mask = jnp.ones((4, 40))
    rows = jnp.array([7, 3, 12, 5])
    batched, _ = sample_anchors(jax.random.key(0), mask, rows, 6)
    alone, _ = sample_anchors(jax.random.key(0), mask[:1], jnp.array([12]), 6)
    reversed_, _ = sample_anchors(jax.random.key(0), mask, rows[::-1], 6)
    assert batched[2].tolist() == alone[0].tolist()
    assert batched[::-1].tolist() == reversed_.tolist()


def test_anchors_are_legal_distinct_and_ascending():
    mask = jnp.asarray(np.random.default_rng(0).random((5, 60)) < 0.8, jnp.float32)
    anchors, keep = sample_anchors(jax.random.key(0), mask, jnp.arange(5), 12)
    legal = np.asarray(blocks.legal_anchors(mask))
    assert keep.all()
    for row, drawn in enumerate(np.asarray(anchors)):
        assert legal[row, drawn].all()
        assert (np.diff(drawn) > 0).all()


def test_a_row_with_too_few_legal_positions_fills_up_with_dropped_zeros():
    anchors, keep = sample_anchors(jax.random.key(0), mask_of("01110011"), jnp.array([0]), 5)
    assert anchors.tolist() == [[1, 2, 6, 0, 0]]
    assert keep.tolist() == [[True, True, True, False, False]]


def test_a_row_has_no_more_anchor_slots_than_positions_with_a_token_after_them():
    anchors, keep = sample_anchors(jax.random.key(0), mask_of("1101"), jnp.array([0]), 5)
    assert (anchors.tolist(), keep.tolist()) == ([[0, 0, 0]], [[True, False, False]])


def test_a_row_without_legal_positions_drops_every_anchor():
    anchors, keep = sample_anchors(jax.random.key(0), mask_of("0100100"), jnp.array([0]), 3)
    assert anchors.tolist() == [[0, 0, 0]]
    assert not keep.any()


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


def test_shifted_labels_start_one_after_the_anchor():
    assert labels_at([1]) == ([[12, 13, 14, 15]], [[1, 1, 1, 1]])


def test_unshifted_labels_start_at_the_anchor_whose_slot_has_no_weight():
    assert labels_at([1], first_slot=1) == ([[11, 12, 13, 14]], [[0, 1, 1, 1]])


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("first_slot, weights", [(0, [1, 0, 0, 0]), (1, [0, 1, 0, 0])])
def test_the_last_anchor_has_exactly_one_supervised_slot(first_slot, weights, contiguous):
    """a = S - 2 with S labels."""
    assert labels_at([6], first_slot=first_slot, contiguous=contiguous)[1] == [weights]


def test_labels_past_the_row_are_clamped_and_have_no_weight():
    assert labels_at([5]) == ([[16, 17, 17, 17]], [[1, 1, 0, 0]])


@pytest.mark.parametrize("first_slot, weights", [(0, [1, 0, 0, 0]), (1, [0, 1, 0, 0])])
def test_contiguous_labels_stop_at_the_first_unsupervised_token(first_slot, weights):
    assert labels_at([1], "01101111", first_slot=first_slot)[1] == [weights]


@pytest.mark.parametrize("first_slot, weights", [(0, [1, 0, 1, 1]), (1, [0, 1, 0, 1])])
def test_uncut_labels_go_on_after_a_gap(first_slot, weights):
    assert labels_at([1], "01101111", first_slot=first_slot, contiguous=False)[1] == [weights]


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_dropped_block_has_no_weight(contiguous):
    assert labels_at([2, 0], keep=[True, False], contiguous=contiguous)[1] == [[1, 1, 1, 1], [0, 0, 0, 0]]


def test_an_unsupervised_anchor_token_does_not_cut_an_unshifted_block():
    """Slot 0 stands for the anchor itself and is no label, so its mask plays no part."""
    assert labels_at([1], "00111111", first_slot=1)[1] == [[0, 1, 1, 1]]


def test_decay_of_shifted_slots_starts_at_slot_zero():
    decay = blocks.position_decay(16, 0, 7.0)
    np.testing.assert_allclose(decay[jnp.array([0, 1, 15])], [1.0, 0.866878, 0.117319], rtol=1e-5)


def test_decay_of_unshifted_slots_starts_at_slot_one():
    decay = blocks.position_decay(16, 1, 7.0)
    np.testing.assert_allclose(decay[jnp.array([1, 2, 15])], [1.0, 0.866878, 0.135335], rtol=1e-5)


def test_head_consumes_the_tokens_from_the_anchor_on_clamped_to_the_row():
    assert blocks.head_tokens(ROW, jnp.array([[1, 6]]), 4).tolist() == [[[11, 12, 13, 14], [16, 17, 17, 17]]]


def test_a_head_may_read_the_token_before_the_anchor_where_its_document_has_one():
    """At the first token of a document the anchor itself takes that place."""
    anchors, positions = jnp.array([[0, 1, 3]]), jnp.array([[0, 1, 2, 0, 1, 2, 3, 4]])
    assert blocks.head_tokens(ROW, anchors, 2, 1).tolist() == [[[10, 10, 11], [10, 11, 12], [12, 13, 14]]]
    assert blocks.head_tokens(ROW, anchors, 2, 1, positions).tolist() == [[[10, 10, 11], [10, 11, 12], [13, 13, 14]]]
    assert blocks.head_tokens(ROW, anchors, 2, 0, positions).tolist() == [[[10, 11], [11, 12], [13, 14]]]
