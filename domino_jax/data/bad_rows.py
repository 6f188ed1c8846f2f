"""Rows that cannot be used: one pass collects them all, and then they are refused together or left out."""

import dataclasses

from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DataError

SHOWN = 3  # messages


@dataclasses.dataclass
class BadRows:
    """Their count, and messages about the first ones, each with the place of its row."""

    count: int = 0
    messages: list[str] = dataclasses.field(default_factory=list)

    def add(self, error: DataError) -> None:
        self.join(BadRows(1, [str(error).replace("\n", " ")]))

    def join(self, others: "BadRows") -> None:
        """Adds bad rows that come later in the data."""
        self.count += others.count
        self.messages = (self.messages + others.messages)[:SHOWN]

    def settle(self, source: str, total: int, skip: bool) -> None:
        """Refuses the bad rows among `total` rows of `source`, or reports that they are left out.

        Raises DataError: there are bad rows and skip is False, or no row is left.
        """
        if not self.count:
            return
        counted = f"{source}: {self.count:,} of {total:,} rows cannot be used"
        if skip and self.count < total:
            say("\n".join([f"{counted} and are left out, such as", *self.messages]))
            return
        remedy = "" if skip else ", or leave them out with --config.data.skip_bad_rows=True"
        raise DataError("\n".join([*self.messages, f"{counted}.", f"Correct or remove them{remedy}."]))
