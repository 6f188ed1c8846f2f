"""The processes of one run wait for each other, and learn the results of process 0.

Process 0 may work for long meanwhile (it hashes checkpoints, builds the index), so waits go through JAX's coordinator:
a collective has a time limit.
"""

import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.journal import locked

LONGEST_WAIT = 24 * 3_600  # seconds that process 0 may work while the others wait
SHARED_SECONDS = 10.0  # until a file of one machine shows on the others, at most
# A restart by a launcher waits for the lock: on a shared disk a machine that was lost holds it until its lease ends,
# 90 seconds by default on an NFS server.
LEASE_SECONDS = 120.0
SAME = "start the same command with the same files on every machine"
_BARRIERS = itertools.count()  # each wait has a separate name


def barrier(name: str) -> None:
    """Wait, for hours if need be, until every process is here; with one process nothing happens."""
    if jax.process_count() > 1:
        _meet(f"{name} {next(_BARRIERS)}")


def _meet(key: str) -> None:
    from orbax.checkpoint import multihost  # takes half a second

    multihost.get_barrier_sync_fn()(key=key, timeout_ms=LONGEST_WAIT * 1_000)


def primary_first(work: Callable[[], Any]) -> Any:
    """The result of `work()`, called in process 0 and then in the others, also when process 0 failed.

    It returns, or raises, once all of them are done: JAX's coordinator ends with process 0, and the others with it.
    """
    if jax.process_count() == 1:
        return work()
    number, primary = next(_BARRIERS), jax.process_index() == 0

    def wait(event: str) -> None:
        _meet(f"{event} {number}")

    if not primary:
        wait("primary done")
    with contextlib.ExitStack() as stack:
        stack.callback(wait, "all done")
        if primary:
            stack.callback(wait, "primary done")
        return work()


def from_primary(work: Callable[[], Any]) -> Any:
    """The JSON value that `work()` returns in process 0, in every process.

    It is called in process 0 alone, whose files the others may not see. When it raises a DominoError or an OSError
    there, the others raise a DataError.
    """
    if jax.process_count() == 1:
        return work()
    primary, failures = jax.process_index() == 0, []

    def answer() -> bytes:
        try:
            return json.dumps(work() if primary else None).encode()
        except (DominoError, OSError) as error:  # raised only after the others know
            failures.append(error)
            return b""

    answered = _broadcast(primary_first(answer))
    if not answered:
        raise failures[0] if primary else DataError("process 0 cannot continue; it prints the reason.")
    return json.loads(answered)


def _broadcast(data: bytes) -> bytes:
    """The bytes of process 0, in every process."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    padded = np.frombuffer(data[:size].ljust(size), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes()


# ---------------------------------------------------------------- one run on several machines


def refuse_differences(values: Mapping[str, Any], change: str = SAME) -> None:
    """A DominoError in every process if one of them has another value than process 0 has.

    Without it each process would compile a different program: at best they would hang in a collective.

    values: JSON values by what a message calls them; in the same order in every process.  change: what to do.
    """
    if jax.process_count() == 1:
        return
    mine = [np.frombuffer(hashlib.sha256(json.dumps(value).encode()).digest(), np.uint8) for value in values.values()]
    everywhere = np.asarray(multihost_utils.process_allgather(np.stack(mine)))  # uint8 [processes, values, 32]
    different = (everywhere != everywhere[0]).any(axis=-1)
    for name, processes in zip(values, different.T, strict=True):
        if processes.any():
            others = ", ".join(map(str, np.flatnonzero(processes)))
            raise DominoError(f"{name} of process {others} and of process 0 differ: {change}.")


def refuse_own_folder(folder: epath.Path) -> None:
    """A DominoError in every process if one of them does not see what process 0 writes into the folder."""
    if jax.process_count() == 1:
        return
    token = from_primary(lambda: secrets.randbits(31))
    probe = folder / f".seen-by-all-{token:x}.tmp"
    if jax.process_index() == 0:
        probe.write_text("")
    barrier("probe written")
    until = time.monotonic() + SHARED_SECONDS
    while not (seen := probe.exists()) and time.monotonic() < until:
        time.sleep(0.5)
    try:
        refuse_differences({f"the folders {folder}": seen}, "name one on a shared disk or in a bucket (gs://)")
    finally:
        if jax.process_index() == 0:
            probe.unlink()


@contextlib.contextmanager
def only_run(workdir: epath.Path) -> Iterator[None]:
    """Creates the workdir and, on a disk, holds its lock; a DominoError while another run holds it."""
    workdir.mkdir(parents=True, exist_ok=True)
    if is_remote(workdir):
        yield
        return
    refuse_own_folder(workdir)
    busy = f"another run is writing {workdir}; wait for it, or choose another --workdir."
    until = time.monotonic() + (LEASE_SECONDS if os.environ.get("DOMINO_RESTARTED") else 0.0)
    with contextlib.ExitStack() as stack:
        while jax.process_index() == 0:
            try:
                stack.enter_context(locked(pathlib.Path(workdir, "run.lock"), busy))
                break
            except DominoError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.5)
        yield
