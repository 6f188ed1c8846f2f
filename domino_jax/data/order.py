"""The order of rows, and which of them share a place in a batch. Both follow from the seed and the lengths alone.

    rows      endless; shuffled again every epoch
    windows   the rows cut into pieces of equal size
    items     one place of a batch each: a row, or a pack of rows. Batch i is items [i·B, (i+1)·B)

A position is a window and an item in it. Nothing depends on how many processes read, so a run continues exactly
with another number of them. It also continues with another batch size: the current window keeps its arrangement.
"""

import bisect
import dataclasses
import threading
from collections.abc import Sequence

import numpy as np

ENDLESS = 2**48
WINDOWS_KEPT = 4


@dataclasses.dataclass(frozen=True)
class Position:
    """Item `item` of the window of `rows` rows from place `first` of the endless order."""

    first: int
    rows: int
    item: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """A batch before it is read: row ids of this process' items, the position after it."""

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


class Plans:
    """Plan i is batch i, counted from a start position: a random-access source for Grain, thread-safe."""

    def __init__(
        self,
        order: Sequence[int],
        lengths: np.ndarray,
        layout: Layout,
        *,
        num_rows: int,
        process_rows: slice,
        start: Position | None,
    ):
        """order: from `row_order`; lengths int32, by row id; num_rows: usable rows; start: None for the beginning."""
        self._process_rows = process_rows
        self._order, self._lengths, self._layout = order, lengths, layout
        self._batch_size = layout.batch_size
        # A window wider than the data would hold a row several times and could pack it beside itself.
        self._window = max(1, min(layout.window, num_rows))
        if start and layout.kind == "pack":  # data.train may have fewer rows than before
            start = dataclasses.replace(start, rows=min(start.rows, self._window))
        #: the position of batch 0
        self.start = start or Position(0, self._window, 0)
        self._windows = [dataclasses.replace(self.start, item=0)]
        # The number of each window's first item; one entry more than there are arranged windows.
        self._item_bounds = [-self.start.item]
        self._arranged: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Plan:
        with self._lock:
            first = number * self._batch_size
            items = [self._item(*self._locate(first + place)) for place in range(self._batch_size)]
            window, item = self._locate(first + self._batch_size, arranged=False)
            position = dataclasses.replace(self._windows[window], item=item)
        return Plan(items[self._process_rows], position)

    def _locate(self, number: int, arranged: bool = True) -> tuple[int, int]:
        """An item's window and its place there; with arranged False the last window may still be unarranged."""
        bounds = self._item_bounds
        while number > bounds[-1] or (arranged and number == bounds[-1]):
            window = self._windows[len(bounds) - 1]
            bounds.append(bounds[-1] + len(self._arrangement(len(bounds) - 1)[1]))
            self._windows.append(Position(window.first + window.rows, self._window, 0))
        window = bisect.bisect_right(bounds, number) - 1
        return window, number - bounds[window]

    def _item(self, window: int, item: int) -> np.ndarray:
        ids, ends = self._arrangement(window)
        return ids[ends[item - 1] if item else 0 : ends[item]]

    def _arrangement(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The window's row ids in item order, and the end of each item among them."""
        if number not in self._arranged:
            while len(self._arranged) >= WINDOWS_KEPT:
                del self._arranged[min(self._arranged)]
            self._arranged[number] = self._arrange(self._windows[number])
        return self._arranged[number]

    def _arrange(self, window: Position) -> tuple[np.ndarray, np.ndarray]:
        places = range(window.first, window.first + window.rows)
        ids = np.asarray([self._order[place] for place in places], np.int64)
        if self._layout.kind == "pack":
            order, ends = pack(self._lengths[ids], self._layout.max_length)
            return ids[order], ends
        return ids, np.arange(1, len(ids) + 1)
