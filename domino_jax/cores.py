"""Keeps a process on a few of its cores while it decodes: a small model loses more by sharing its work than it gains."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

THREADS = pathlib.Path("/proc/self/task")


@contextlib.contextmanager
def kept_to(count: int) -> Iterator[None]:
    """Within it, all threads of this process run on `count` of the cores they may use; 0, or too many: on all of them.

    Which ones depends on the process, so that two runs beside each other do not meet on one core. The cores as they
    were are given back at the end. Does nothing where the system cannot be asked for it (only Linux can).
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") and THREADS.is_dir() else []
    if not 0 < count < len(allowed):
        yield
        return
    first = os.getpid() % len(allowed)
    _keep({allowed[(first + index) % len(allowed)] for index in range(count)})
    try:
        yield
    finally:
        _keep(set(allowed))


def usable() -> int:
    """How many cores the calling thread may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keep(cores: set[int]) -> None:
    """Sets the cores of every thread; those that they start later inherit them."""
    for thread in THREADS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
