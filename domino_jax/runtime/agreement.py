"""What the processes of one run do together: they wait for each other, and learn what process 0 found.

Waits in which process 0 may work for long (it hashes checkpoints, builds the index) go through JAX's coordinator. A
collective (`barrier`, a broadcast) has a time limit.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

LONGEST_WAIT = 24 * 3_600  # seconds that process 0 may work while the others wait
_BARRIERS = itertools.count()  # each wait has a separate name


def barrier(name: str) -> None:
    """Wait until every process is here; with one process nothing happens."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def primary_first(work: Callable[[], Any]) -> Any:
    """The result of `work()`, called in process 0 and then in the others, also when process 0 failed.

    It returns, or raises, once all of them are done: JAX's coordinator ends with process 0, and the others with it.
    """
    if jax.process_count() == 1:
        return work()
    from orbax.checkpoint import multihost  # takes half a second

    number, primary = next(_BARRIERS), jax.process_index() == 0

    def wait(event: str) -> None:
        multihost.get_barrier_sync_fn()(key=f"{event} {number}", timeout_ms=LONGEST_WAIT * 1_000)

    if not primary:
        wait("primary done")
    with contextlib.ExitStack() as stack:
        stack.callback(wait, "all done")
        if primary:
            stack.callback(wait, "primary done")
        return work()


def from_primary(work: Callable[[], int]) -> int:
    """The integer (int32, or a truth value) that `work()` returns in process 0, in every process.

    It is called in process 0 alone, whose files the others may not see. It must not raise there: the others would wait
    for its answer.
    """
    if jax.process_count() == 1:
        return work()
    value = primary_first(lambda: int(work()) if jax.process_index() == 0 else 0)
    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))
