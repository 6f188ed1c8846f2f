"""The working end of the pipeline: a batch's rows are read, encoded and laid out, here or in worker processes."""

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from domino_jax.data.chat import Row
from domino_jax.data.order import ENDLESS, Items, Layout, Position
from domino_jax.data.processes import follow_parent
from domino_jax.data.rows import TrainingRows
from domino_jax.runtime.errors import DominoError

POSITION = "position"  # rides in every batch of the pipeline: int64 [4], where the next batch begins


@dataclasses.dataclass(frozen=True)
class Plan:
    """A batch before it is read: row ids of this process' items, the length of all, the position behind it."""

    items: list[np.ndarray]
    length: int
    position: Position


@dataclasses.dataclass(frozen=True)
class Plans:
    """Plan i is batch i, counted from the start of `items`: a random-access source for Grain."""

    items: Items
    lengths: np.ndarray
    layout: Layout
    process_rows: slice

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Plan:
        items, position = self.items.batch(number)
        # Over the whole batch, also what other processes read: they all have to agree on its length.
        longest = max(int(self.lengths[ids].sum()) for ids in items)
        return Plan(items[self.process_rows], self.layout.padded_length(longest), position)


@dataclasses.dataclass(frozen=True)
class BatchEncoder:
    """Plans to batches (pipeline.Batches.start says what those hold)."""

    rows: TrainingRows
    layout: Layout

    def __call__(self, plan: Plan) -> dict[str, np.ndarray]:
        placed = [[self.rows.read(int(row_id)) for row_id in ids] for ids in plan.items]
        if self.layout.kind == "pack":
            filled = [pack_rows(rows, plan.length) for rows in placed]
        else:
            filled = [pad_row(rows[0], plan.length) for rows in placed]
        batch = {name: np.stack([item[name] for item in filled]) for name in filled[0]}
        batch["row_ids"] = np.asarray([ids[0] for ids in plan.items], np.int32)
        return batch | {POSITION: np.asarray(dataclasses.astuple(plan.position), np.int64)}


def pad_row(row: Row, length: int) -> dict[str, np.ndarray]:
    """tokens int32 [length], loss_mask float32 [length], the row at the left."""
    # Padding needs no token of its own: it is unsupervised and behind everything that may attend to it.
    room = (0, length - len(row.token_ids))
    return {"tokens": np.pad(row.token_ids, room), "loss_mask": np.pad(row.loss_mask, room)}


def pack_rows(rows: list[Row], length: int) -> dict[str, np.ndarray]:
    """Rows side by side, each a document of its own.

    tokens, positions, documents int32 [length], loss_mask float32 [length]. Two rows of 3 and 2 tokens in 7:

        documents 1 1 1 2 2 0 0
        positions 0 1 2 0 1 0 0
    """
    sizes = [len(row.token_ids) for row in rows]
    whole = Row(np.concatenate([row.token_ids for row in rows]), np.concatenate([row.loss_mask for row in rows]))
    room = (0, length - sum(sizes))
    positions = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    documents = np.repeat(np.arange(1, len(rows) + 1, dtype=np.int32), sizes)
    return pad_row(whole, length) | {"positions": np.pad(positions, room), "documents": np.pad(documents, room)}


def start_worker(index: int, count: int) -> None:
    """What Grain calls first in each of its processes."""
    follow_parent()


class BatchIterator:
    """Endless batches; after a failure it is closed and stays so."""

    def __init__(self, batches: Iterator[dict], start: Position, files: Any = None):
        """batches: Grain's iterator; start: where it begins; files: what must live as long as they are read."""
        self._batches = batches
        self._position = start
        self._files = files
        self._closing: threading.Thread | None = None

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._closing:
            raise DominoError("the data is closed: an earlier failure or close() ended it.")
        try:
            batch = next(self._batches)
        except DominoError:
            self._begin_closing()
            raise
        except RuntimeError as error:
            self._begin_closing()
            if "Worker process was terminated" not in str(error):
                raise
            raise DominoError(
                f"a data worker process ended ({str(error).partition('.')[0]}), killed from outside or out of memory.\n"
                "Start again: the run continues from its last checkpoint. Lower data.workers if memory is short."
            ) from error
        # Copies: what workers hand over lies in shared memory that goes when the array does.
        batch = {name: np.array(value) for name, value in batch.items()}
        self._position = Position(*batch.pop(POSITION).tolist())
        return batch

    def state(self) -> dict[str, int]:
        """A small JSON value: the position behind the last batch returned, for `Batches.start`."""
        return dataclasses.asdict(self._position)

    def close(self) -> None:
        """Ends threads and worker processes; may be called twice."""
        self._begin_closing()
        self._closing.join()

    def _begin_closing(self) -> None:
        # Beside: what went wrong is told at once, while Grain may wait for its workers for seconds.
        if not self._closing:
            self._closing = threading.Thread(target=self._batches.close, name="close-data")
            self._closing.start()

    def __enter__(self) -> "BatchIterator":
        return self

    def __exit__(self, *exception) -> None:
        self.close()
