"""How a training run spends its time: rates, utilisation of the devices, waiting for data."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator


class StepClock:
    """Takes the time of a training loop (loop.py).

    Working time is the loop's time after its first step, without what `aside` covers. The first step holds the
    compilation and counts in no rate; its time is `first_step_seconds`.
    """

    def __init__(self, *, row_flops: Callable[[int], float] | None = None, peak_flops: float | None = None):
        """
        Args:
            row_flops: tokens of a row → FLOPs of its part of a step.
            peak_flops: FLOP/s of all devices together; without it there is no "mfu".
        """
        self._row_flops = functools.cache(row_flops) if row_flops else None
        self._peak = peak_flops
        self._fetched = time.monotonic()
        self.first_step_seconds: float | None = None
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._begin = time.monotonic()
        self._waited = self._elsewhere = self._flops = 0.0
        self._rows = self._tokens = 0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the call that fetches the next batch."""
        begin = time.monotonic()
        yield
        self._fetched = time.monotonic()
        self._waited += self._fetched - begin

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Around what is no step: evaluation, checkpoints. Read the step's values first, or its end counts as aside."""
        begin = time.monotonic()
        yield
        self._elsewhere += time.monotonic() - begin

    def step_done(self, rows: int, tokens: int) -> None:
        """Counts a step of a global batch, its tokens with padding. The first one has to be over on the devices."""
        if self.first_step_seconds is None:
            self.first_step_seconds = time.monotonic() - self._fetched
            self._begin_interval()
            return
        self._rows += rows
        self._tokens += tokens
        if self._row_flops:
            self._flops += rows * self._row_flops(tokens // rows)

    def rates(self) -> dict[str, float]:
        """The figures since the last call, from the second step on; call it when the step's values were read.

        Returns:
            "rows_per_second" and "tokens_per_second" over the working time; "data_wait", the share of it that the loop
            waited for batches (the devices may have been busy with earlier steps); "mfu" where the devices' peak is
            known: the FLOPs of the step's matrix products against it.
        """
        working = time.monotonic() - self._begin - self._elsewhere
        rates = {}
        if self._rows and working > 0:
            rates = {
                "rows_per_second": self._rows / working,
                "tokens_per_second": self._tokens / working,
                "data_wait": self._waited / working,
            }
            if self._peak and self._row_flops:
                rates["mfu"] = self._flops / working / self._peak
        self._begin_interval()
        return rates
