"""The end of a run at a loss or gradient that is not finite, with the rows that gave it."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from domino_jax.runtime.errors import NonFiniteError

KEPT_STEPS = 4_096  # more than anyone logs apart; row ids are a few bytes each
NAMED_ROWS = 8


class NonFiniteGuard:
    """The jitted step never applies such an update; this class reads its count and names the rows of the batch.

    Args:
        stop: end the run at such a step; else it is left out and counted ("skipped" in metrics.jsonl).
        skipped: steps left out before this start.
        where: row id → "file:line" of the row.
    """

    def __init__(self, stop: bool, skipped: int, where: Callable[[int], str]):
        self._stop, self._skipped, self._where = stop, skipped, where
        self._rows: dict[int, np.ndarray] = {}

    def remember(self, step: int, row_ids: np.ndarray) -> None:
        """The rows (of this process) that step `step`, counted from 1, trains on."""
        self._rows[step] = row_ids
        self._rows.pop(step - KEPT_STEPS, None)

    def check(self, values: Mapping[str, float]) -> None:
        """Raises NonFiniteError when steps were left out since the last call and the run is to stop at them.

        values: a step's metrics, with "skipped" and "bad_step".
        """
        new = int(values["skipped"]) - self._skipped
        self._skipped += new
        if not (self._stop and new):
            return
        step = int(values["bad_step"])
        rows = self._rows.get(step, np.zeros(0, np.int32))
        named = ", ".join(self._where(int(row)) for row in rows[:NAMED_ROWS])
        bad = [name for name in ("loss", "grad_norm") if not math.isfinite(values[name])]
        raise NonFiniteError(
            f"step {step}: {' and '.join(bad) or 'loss or gradient'} not finite; rows of the batch: {named}.\n"
            "The last checkpoint is intact. Look at these rows, lower train.learning_rate, or leave such "
            "steps out with --config.train.non_finite=skip."
        )
