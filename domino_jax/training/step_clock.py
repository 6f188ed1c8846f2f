"""How a training run spends its time: rates, utilisation of the devices, waiting for data."""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator


class StepClock:
    """Takes the time of a training loop (loop.py), which restarts it after the first step and its compilation."""

    def __init__(self, row_flops: Callable[[int], float] | None = None, peak_flops: float | None = None):
        """
        Args:
            row_flops: tokens of a row → FLOPs of its part of a step.
            peak_flops: FLOP/s of all devices together; without it there is no "mfu".
        """
        self._row_flops = functools.cache(row_flops) if row_flops and peak_flops else None
        self._peak = peak_flops
        self.restart()

    def restart(self) -> None:
        """An interval begins."""
        self._begin = time.monotonic()
        self._seconds, self._counts = Counter(), Counter()

    @contextlib.contextmanager
    def spent(self, on: str) -> Iterator[None]:
        """Around the fetch of the next batch ("data") and what is no step ("aside": evaluation, checkpoints).

        Read the step's values before the latter, or its end counts as aside.
        """
        begin = time.monotonic()
        yield
        self._seconds[on] += time.monotonic() - begin

    def step_done(self, rows: int, tokens: int) -> None:
        """Counts a step of a global batch, its tokens with padding."""
        flops = rows * self._row_flops(tokens // rows) if self._row_flops else 0.0
        self._counts.update(rows=rows, tokens=tokens, flops=flops)

    def rates(self) -> dict[str, float]:
        """The figures since the last call, from the second step on; call it when the step's values were read.

        Returns:
            "rows_per_second" and "tokens_per_second" over the working time; "data_wait", the share of it that the loop
            waited for batches (the devices may have been busy with earlier steps); "mfu" where the devices' peak is
            known: the FLOPs of the step's matrix products against it.
        """
        working = time.monotonic() - self._begin - self._seconds["aside"]
        waited, counts = self._seconds["data"], self._counts
        self.restart()
        if not counts["rows"] or working <= 0:
            return {}
        rates = {
            "rows_per_second": counts["rows"] / working,
            "tokens_per_second": counts["tokens"] / working,
            "data_wait": waited / working,
        }
        return rates | ({"mfu": counts["flops"] / working / self._peak} if self._row_flops else {})
