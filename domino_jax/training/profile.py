"""A profiler trace of a few steps, for xprof or TensorBoard."""

import os
from collections.abc import Sequence
from typing import Any

import jax


class Profile:
    """Traces steps first..last (counted from 1) of `steps` = (first, last) into `folder`; nothing for ()."""

    def __init__(self, folder: str | os.PathLike, steps: Sequence[int]):
        self._folder = os.fspath(folder)
        self._first, self._last = steps or (0, 0)
        self._running = False

    def before(self, step: int) -> None:
        if step == self._first:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, result: Any) -> None:
        """result: arrays of the step, waited for when it is the last one."""
        if self._running and step >= self._last:
            jax.block_until_ready(result)
            self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exception) -> None:
        self._stop()
