"""The order of rows, and which of them share a place in a batch. Both follow from the seed and the lengths alone.

    rows      endless; shuffled again every epoch
    windows   the rows cut into pieces of equal size
    items     one place of a batch each: a row, or a pack of rows. Batch i is items [i·B, (i+1)·B)

A position is a window and an item in it. Nothing depends on how many processes read, so a run continues exactly
with another number of them. It also continues with another batch size: the current window keeps its arrangement.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Position:
    """Item `item` of the window of `rows` rows from place `first` of the endless order."""

    first: int
    rows: int
    item: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A batch before it is read: the row ids of each item, the position after it."""

    items: list[np.ndarray]
    position: Position


@dataclasses.dataclass(frozen=True)
class Layout:
    """How rows fill the places of a batch.

    kind: pad (rows to max_length) or pack (rows side by side).
    max_length: tokens a row is cut to, and tokens of a place. batch_size: places of the global batch.
    window: rows that are packed together.
    """

    kind: str
    max_length: int
    batch_size: int
    window: int


def row_order(ids: np.ndarray, seed: int) -> Sequence[int]:
    """The endless order of row ids, shuffled every epoch: a grain.MapDataset."""
    import grain  # here: a second that only training needs

    return grain.MapDataset.source(ids).seed(seed % 2**32).shuffle().repeat()


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """First-fit packs, longest row first: (the rows' order, pack by pack; the end of each pack in that order).

    lengths int [n], none above capacity. Rows of a pack keep their order, and packs come in the order of their first
    rows, so that short packs do not gather at the end.

        lengths 3 6 2 5, capacity 8  →  order 0 3 | 1 2, ends 2 4
    """
    room = np.full(len(lengths), capacity)
    chosen = np.zeros(len(lengths), np.int64)
    used = 0
    for place in np.argsort(-lengths, kind="stable"):
        first_fit = int(np.argmax(room[: used + 1] >= lengths[place]))
        chosen[place] = first_fit
        room[first_fit] -= lengths[place]
        used = max(used, first_fit + 1)
    first_rows = np.unique(chosen, return_index=True)[1]
    rank = np.empty(len(first_rows), np.int64)
    rank[np.argsort(first_rows)] = np.arange(len(first_rows))
    order = np.argsort(rank[chosen], kind="stable")
    return order, np.cumsum(np.bincount(rank[chosen]))


def first_position(layout: Layout, num_rows: int) -> Position:
    """The beginning; num_rows: usable rows."""
    # A window wider than the data would hold a row several times and could pack it beside itself.
    return Position(0, min(layout.window, num_rows), 0)


def plan_batches(
    order: Sequence[int], lengths: np.ndarray, layout: Layout, num_rows: int, position: Position
) -> Iterator[Plan]:
    """The batches of a run from a position on, endless.

    order: from `row_order`.  lengths: int32, by row id.  num_rows: usable rows.
    """
    if layout.kind == "pack":  # data.train may have fewer rows than before
        position = dataclasses.replace(position, rows=min(position.rows, num_rows))
    items, batch = _arrange(order, lengths, layout, position), []
    while True:
        if position.item >= len(items):
            following = first_position(layout, num_rows)
            position = dataclasses.replace(following, first=position.first + position.rows)
            items = _arrange(order, lengths, layout, position)
        batch.append(items[position.item])
        position = dataclasses.replace(position, item=position.item + 1)
        if len(batch) == layout.batch_size:
            yield Plan(batch, position)
            batch = []


def _arrange(order: Sequence[int], lengths: np.ndarray, layout: Layout, window: Position) -> list[np.ndarray]:
    """The items of a window: the row ids of each."""
    ids = np.asarray([order[place] for place in range(window.first, window.first + window.rows)], np.int64)
    if layout.kind == "pad":
        return list(ids[:, None])
    rows, ends = pack(lengths[ids], layout.max_length)
    return np.split(ids[rows], ends[:-1])
