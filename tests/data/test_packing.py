"""order.py and reading.py: packs of whole rows, with the place of each document."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from domino_jax.data.chat import TrainingRow
from domino_jax.data.order import Layout, first_position, pack, plan_batches, row_order
from domino_jax.data.reading import pack_rows


def packs_of(lengths, capacity):
    order, ends = pack(np.asarray(lengths), capacity)
    return [order[first:last].tolist() for first, last in zip([0, *ends[:-1]], ends, strict=True)]


def test_packs_are_first_fit_longest_first_and_keep_the_rows_order():
    assert packs_of([3, 6, 2, 5], 8) == [[0, 3], [1, 2]]
    assert packs_of([8, 8, 1], 8) == [[0], [1], [2]]
    assert packs_of([1, 1, 1, 1], 3) == [[0, 1, 2], [3]]


@hypothesis.settings(deadline=None)  # the machine may be busy
@hypothesis.given(st.lists(st.integers(1, 32), min_size=1, max_size=60))
def test_packs_hold_every_row_once_none_overflows_and_few_are_half_empty(lengths):
    packs = packs_of(lengths, 32)
    assert sorted(place for members in packs for place in members) == list(range(len(lengths)))
    filled = [sum(lengths[place] for place in members) for members in packs]
    assert max(filled) <= 32
    assert sum(tokens <= 16 for tokens in filled) <= 1  # two such packs would fit into one


def test_a_packed_row_restarts_positions_and_counts_documents():
    rows = [
        TrainingRow(np.array([7, 8, 9], np.int32), np.array([0, 1, 1], np.float32)),
        TrainingRow(np.array([5, 6], np.int32), np.array([1, 1], np.float32)),
    ]
    packed = pack_rows(rows, 7)
    assert {name: value.tolist() for name, value in packed.items()} == {
        "tokens": [7, 8, 9, 5, 6, 0, 0],
        "loss_mask": [0, 1, 1, 1, 1, 0, 0],
        "positions": [0, 1, 2, 0, 1, 0, 0],
        "documents": [1, 1, 1, 2, 2, 0, 0],
    }


def test_a_position_in_more_rows_than_there_are_now_packs_none_beside_itself():
    layout = Layout("pack", 32, 4, 64)

    def plans(rows, position):
        return plan_batches(row_order(np.arange(rows), 7), np.full(rows, 10, np.int32), layout, rows, position)

    before = plans(48, first_position(layout, 48))
    now = plans(10, [next(before), next(before)][1].position)
    items = [ids.tolist() for _ in range(6) for ids in next(now).items]
    assert all(len(set(item)) == len(item) for item in items) and {*sum(items, [])} == set(range(10))
