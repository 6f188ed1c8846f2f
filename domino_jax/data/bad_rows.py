"""Rows that cannot be used: one pass collects them all, and then they are refused together or left out."""

import dataclasses
import re

from domino_jax.runtime.distributed import is_primary
from domino_jax.runtime.errors import DataError

SHOWN_PLACES = 10
SHOWN_KINDS = 3


@dataclasses.dataclass
class BadRows:
    """places: (file, line) or ("prompt", id) of the first ones.

    kinds: kind → (message of its first row, number of its rows).
    """

    count: int = 0
    places: list[tuple[str, int | str]] = dataclasses.field(default_factory=list)
    kinds: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)

    def add(self, file: str, line: int | str, error: DataError) -> None:
        message = str(error).replace("\n", " ")
        self.join(BadRows(1, [(file, line)], {kind_of(message): (message, 1)}))

    def join(self, others: "BadRows") -> None:
        """Adds bad rows that come later in the data."""
        self.count += others.count
        self.places = (self.places + others.places)[:SHOWN_PLACES]
        for kind, (message, number) in others.kinds.items():
            first, before = self.kinds[kind] if kind in self.kinds else (message, 0)
            self.kinds[kind] = first, before + number

    def settle(self, source: str, total: int, skip: bool) -> None:
        """Refuses the bad rows among `total` rows of `source`, or reports that they are left out.

        Raises:
            DataError: there are bad rows and skip is False, or no row is left.
        """
        if not self.count:
            return
        kinds = sorted(self.kinds.values(), key=lambda kind: -kind[1])[:SHOWN_KINDS]
        lines = [f"{message} ({number:,} such rows)" if number > 1 else message for message, number in kinds]
        places, before = [], None
        for file, line in self.places:
            places.append(str(line) if file == before else f"{file}:{line}")
            before = file
        more = ", ..." if self.count > len(places) else ""
        counted = f"{source}: {self.count:,} of {total:,} rows cannot be used ({', '.join(places)}{more})"
        if skip and self.count < total:
            if is_primary():
                print(f"{counted} and are left out.", *lines, sep="\n", flush=True)
            return
        remedy = "" if skip else ", or leave them out with --config.data.skip_bad_rows=True"
        raise DataError("\n".join([*lines, f"{counted}.", f"Correct or remove them{remedy}."]))


def kind_of(message: str) -> str:
    """The message without its values and its place, the same for rows that are wrong in the same way."""
    text = message.partition(": ")[2] or message
    return re.sub(r"'.*'|\".*\"|\{.*\}|\[.*\]|\d+", "…", text)[:100]
