"""How large the batch and the caches of a queue are in its next dispatch: a pure function of the work that is left."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

CACHE_STEP = 128  # caches of a queue end at a multiple of it: TPUs pad scores to this many lanes


class BatchShape(NamedTuple):
    """rows: of the batch.  slots: of the caches.  admitted: how many of the requests that wait get a row.
    together: how many of these are read in one prefill."""

    rows: int
    slots: int
    admitted: int = 0
    together: int = 1


@dataclasses.dataclass(frozen=True)
class ShapeLimits:
    """The sizes that a queue may have.

    batches: rows of a batch, the smallest first.
    least, most: slots that the caches have at all times, and that they never exceed.
    block_rows: slots that a round writes after the committed ones.
    several: whether an eighth of the rows is admitted together while enough requests wait: their prefill then uses the
        device better.
    """

    batches: tuple[int, ...]
    least: int
    most: int
    block_rows: int
    several: bool = False

    def largest(self) -> "ShapeLimits":
        """The limits of a queue whose batch and caches always have their largest size."""
        return dataclasses.replace(self, batches=self.batches[-1:], least=self.most)

    def together(self, rows: int, waiting: int) -> int:
        several = max(rows // 8, 1) if self.several else 1
        return several if waiting >= several else 1

    def slots(self, length: int) -> int:
        """Slots for a row of `length` tokens and a block: a power of two within the limits."""
        return max(self.least, min(1 << (length + self.block_rows - 1).bit_length(), self.most))

    def idle(self, rows: int, waiting: int) -> int:
        """A dispatch ends when more rows than this are done (loop.run_rounds): requests that wait can then have rows,
        or a smaller batch holds the rest."""
        smaller = max((size for size in self.batches if size < rows), default=0)
        return (self.together(rows, waiting) if waiting else rows - smaller) - 1


def next_shape(
    now: BatchShape | None, lengths: Sequence[int], waiting: Sequence[int], limits: ShapeLimits
) -> BatchShape:
    """The smallest batch that holds all requests, or the largest, with caches for the longest row and a block.

    Args:
        now: the batch that runs; None where the first one starts, which takes any number of requests together.
        lengths: committed tokens of each row that answers a request.
        waiting: tokens of the prompts that wait, in their order.
    """
    requests = len(lengths) + len(waiting)
    rows = next((size for size in limits.batches if size >= requests), limits.batches[-1])
    together = limits.together(rows, len(waiting)) if now else 1
    free = min(rows - len(lengths), len(waiting))
    admitted = free - free % together
    longest = max([*lengths, *waiting[:admitted]], default=0)
    return BatchShape(rows, limits.slots(longest), admitted, together)


def taken_over(rows: Sequence[object], count: int) -> list[int]:
    """The rows that a batch of `count` rows takes over. Where some have to go, the ones without a request go first."""
    order = range(len(rows))
    return sorted(order, key=lambda row: rows[row] is None)[:count] if count < len(rows) else list(order)
