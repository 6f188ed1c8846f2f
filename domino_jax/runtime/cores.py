"""Keeps a process on a few cores while it decodes: a small model loses more by sharing its work than it gains."""

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator

THREADS = pathlib.Path("/proc/self/task")
STAT = pathlib.Path("/proc/stat")
WATCHED = 0.2  # seconds that the cores are watched for


@contextlib.contextmanager
def kept_to(count: int) -> Iterator[None]:
    """Limits all threads of this process to `count` of the cores they may use; 0, or too many: all of them.

    The idlest cores are taken, because no scheduler can move the process away later. Ties are broken by the process
    id, so that two runs that start together take different cores. All cores are given back at the end. Only Linux has
    the system call; elsewhere this does nothing.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") and THREADS.is_dir() else []
    if not 0 < count < len(allowed):
        yield
        return
    first = os.getpid() % len(allowed)
    before = idle_time()
    time.sleep(WATCHED)
    idle = {core: spent - before.get(core, 0) for core, spent in idle_time().items()}
    turned = allowed[first:] + allowed[:first]
    _keep(set(sorted(turned, key=lambda core: -idle.get(core, 0))[:count]))
    try:
        yield
    finally:
        _keep(set(allowed))


def idle_time() -> dict[int, int]:
    """By core, the time in ticks of 10 ms that it has been idle or has waited for a disk since the machine started."""
    lines = [line.split() for line in STAT.read_text().splitlines() if line.startswith("cpu")]
    return {int(name[3:]): int(spent[3]) + int(spent[4]) for name, *spent in lines if name != "cpu"}


def usable() -> int:
    """How many cores the calling thread may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keep(cores: set[int]) -> None:
    """Sets the cores of every thread; those that they start later inherit them."""
    for thread in THREADS.iterdir():
        with contextlib.suppress(ProcessLookupError):  # ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
