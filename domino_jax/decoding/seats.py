"""The host's record of which prompt occupies which row of a batch."""

import dataclasses
from collections import deque
from collections.abc import Iterable


@dataclasses.dataclass
class Row:
    """A row of the batch that answers a prompt.

    index: of the prompt.  length: committed tokens, the prompt's included.  drafted: drafts verified so far.
    """

    index: int
    length: int
    drafted: int = 0


class Seats:
    """The rows of a batch and the prompts that wait for one.

    rows: None for those that are free.  waiting: indices of prompts, in order.
    """

    def __init__(self, rows: Iterable[Row | None], waiting: Iterable[int] = ()):
        self.rows = list(rows)
        self.waiting = deque(waiting)

    def unfinished(self) -> dict[int, Row]:
        """{slot: row} of the rows that answer a prompt."""
        return {slot: row for slot, row in enumerate(self.rows) if row}

    def longest(self) -> int:
        """Committed tokens of the longest row that answers a prompt."""
        return max(row.length for row in self.unfinished().values())

    def keep(self, size: int) -> list[int]:
        """Cuts the batch to `size` rows, those that answer first; returns the slots that stay, in their new order."""
        kept = list(range(len(self.rows)))
        if size < len(self.rows):
            kept = sorted(kept, key=lambda slot: self.rows[slot] is None)[:size]
        self.rows = [self.rows[slot] for slot in kept]
        return kept

    def fill(self, lengths: list[int], together: int = 1) -> list[int]:
        """Gives free rows to waiting prompts, a multiple of `together` of them; returns their slots.

        lengths: of all prompts.
        """
        free = [slot for slot, row in enumerate(self.rows) if row is None][: len(self.waiting)]
        free = free[: len(free) // together * together]
        for slot in free:
            index = self.waiting.popleft()
            self.rows[slot] = Row(index, lengths[index])
        return free
