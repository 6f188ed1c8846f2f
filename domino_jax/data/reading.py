"""Reads, encodes and lays out the rows of a batch."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from domino_jax.data.chat import TrainingRow
from domino_jax.data.order import Layout, Plan, Position
from domino_jax.data.rows import TrainingRows

POSITION = "position"  # a key of every batch inside the pipeline: int64 [3], the position of the next batch


@dataclasses.dataclass(frozen=True)
class BatchEncoder:
    """Plans to batches (see pipeline.Batches.start)."""

    rows: TrainingRows
    layout: Layout

    def __call__(self, plan: Plan) -> dict[str, np.ndarray]:
        placed = [[self.rows.read(int(row_id)) for row_id in ids] for ids in plan.items]
        length = self.layout.max_length
        if self.layout.kind == "pack":
            filled = [pack_rows(rows, length) for rows in placed]
        else:
            filled = [pad_row(rows[0], length) for rows in placed]
        batch = {name: np.stack([item[name] for item in filled]) for name in filled[0]}
        batch["row_ids"] = np.asarray([ids[0] for ids in plan.items], np.int32)
        return batch | {POSITION: np.asarray(dataclasses.astuple(plan.position), np.int64)}


def pad_row(row: TrainingRow, length: int) -> dict[str, np.ndarray]:
    """tokens int32 [length] and loss_mask float32 [length], padded on the right."""
    # Padding needs no special token: it is unsupervised, and nothing before it attends to it.
    room = (0, length - len(row.token_ids))
    return {"tokens": np.pad(row.token_ids, room), "loss_mask": np.pad(row.loss_mask, room)}


def pack_rows(rows: list[TrainingRow], length: int) -> dict[str, np.ndarray]:
    """Rows side by side, each a separate document.

    tokens, positions, documents int32 [length], loss_mask float32 [length]. Two rows of 3 and 2 tokens in 7:

        documents 1 1 1 2 2 0 0
        positions 0 1 2 0 1 0 0
    """
    sizes = [len(row.token_ids) for row in rows]
    token_ids, masks = [row.token_ids for row in rows], [row.loss_mask for row in rows]
    whole = TrainingRow(np.concatenate(token_ids), np.concatenate(masks))
    room = (0, length - sum(sizes))
    positions = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    documents = np.repeat(np.arange(1, len(rows) + 1, dtype=np.int32), sizes)
    return pad_row(whole, length) | {"positions": np.pad(positions, room), "documents": np.pad(documents, room)}


class BatchIterator:
    """Endless batches."""

    def __init__(self, batches: Iterator[dict], start: Position):
        """batches: Grain's iterator; start: its position."""
        self._batches = batches
        self._position = start

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._batches)
        self._position = Position(*batch.pop(POSITION).tolist())
        return batch

    def state(self) -> dict[str, int]:
        """The position after the last returned batch as JSON values, for `Batches.start`."""
        return dataclasses.asdict(self._position)

    def __enter__(self) -> "BatchIterator":
        return self

    def __exit__(self, *exception) -> None:
        self._batches.close()  # ends the threads
