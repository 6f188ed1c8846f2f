"""Starting the processes of one run with jax.distributed, and how a process leaves it.

The environment, all of it optional:

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID   the place of this process, where JAX detects no cluster
    DOMINO_NUM_PROCESSES                                         how many must have come up, or the start is refused
    DOMINO_INIT_SECONDS (50)                                     how long the start waits for the other processes
    DOMINO_HEARTBEAT_SECONDS (100)                               silence after which a process counts as lost
"""

import os
import signal
import sys

import jax

from domino_jax.runtime.agreement import barrier
from domino_jax.runtime.errors import DominoError, first_line

PLACE = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
NO_CLUSTER = "coordinator_address should be defined."  # JAX, where nobody names an address and it detects no cluster
LOOPBACK = ("127.", "localhost:", "[::1]:")


def initialize(mode: str = "auto", preemptible: bool = True) -> None:
    """Connect this process with the others of its run, before the first use of a device.

    When the others do not come in time, or one of them is lost later, JAX ends the process by SIGABRT; launchers answer
    a signal with a new start.

    Args:
      mode: off: this process alone. auto: what PLACE names where JAX_NUM_PROCESSES is set; else what JAX detects (Cloud
        TPU, Slurm, Open MPI, Kubernetes), else this process alone.
      preemptible: of several processes, JAX holds SIGTERM back until preemption.py asks for it. False: the signal ends
        the process.
    Raises DominoError: the place is incomplete or cannot be used, or another number of processes or no device came up.
    """
    jax.config.update("jax_enable_preemption_service", preemptible)
    if mode == "auto":
        _connect(**_place() if os.environ.get("JAX_NUM_PROCESSES") else {})
    devices = _devices()
    expected = os.environ.get("DOMINO_NUM_PROCESSES")
    if expected and expected != str(jax.process_count()):
        raise DominoError(
            f"DOMINO_NUM_PROCESSES is {expected}, but {jax.process_count()} came up: start the command on every machine"
            " of the run, or correct it."
        )
    if jax.distributed.is_initialized() and jax.process_count() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # takes it back from JAX
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    say(f"topology: {_count(jax.process_count(), 'process', 'es')}, {_count(len(devices), 'device', 's')} ({kinds})")


def _place() -> dict:
    address, count, process = (os.environ.get(name, "") for name in PLACE)
    if not (address and count.isdecimal() and process.isdecimal()):
        pairs = ", ".join(f"{name} is {os.environ.get(name)!r}" for name in PLACE)
        raise DominoError(f"{pairs}: set them to HOST:PORT, the number of processes and the number of this one.")
    place = {"coordinator_address": address, "num_processes": int(count), "process_id": int(process)}
    # JAX would listen on every interface; a coordinator on the loopback is served there alone.
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or (address if address.startswith(LOOPBACK) else None)
    return {**place, "coordinator_bind_address": bind, "cluster_detection_method": "deactivate"}


def _connect(**place) -> None:
    patience = {"initialization_timeout": _seconds("DOMINO_INIT_SECONDS", 50)}
    patience["heartbeat_timeout_seconds"] = _seconds("DOMINO_HEARTBEAT_SECONDS", 100)
    try:
        jax.distributed.initialize(**place, **patience)
    except (ValueError, RuntimeError) as error:
        if str(error) == NO_CLUSTER and not place:
            return
        raise DominoError(
            f"jax.distributed cannot start ({first_line(error, with_class=False)}). Correct {', '.join(PLACE)}, or pass"
            " --distributed=off."
        ) from error


def _seconds(name: str, default: int) -> int:
    """The environment variable `name`, a whole number of seconds; `default` when it is not set."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise DominoError(f"{name} is {value!r}: set it to a whole number of seconds.")
    return int(value)


def _devices() -> list[jax.Device]:
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # an unknown or absent platform is either
        raise DominoError(
            f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '')!r}, and jax finds no such device"
            f" ({first_line(error, with_class=False)}). Install jax for it, as"
            ' pip install "jax[cuda13]" or "jax[tpu]", or set JAX_PLATFORMS=cpu.'
        ) from error


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"


def is_one_of_several() -> bool:
    """Whether other processes are connected with this one."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_primary() -> bool:
    """True in the one process that writes files and prints."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints a line of the run, from that process alone."""
    if is_primary():
        print(text, flush=True)


def shutdown() -> None:
    """The end of a run that went well: wait for the others, then close JAX's services. No device is used after it."""
    if not jax.distributed.is_initialized():
        return
    # JAX's own goodbye has a time limit, and one process may still write the report while the others are done.
    barrier("shutdown")
    jax.distributed.shutdown()


def leave(code: int) -> None:
    """Leave a run of several processes at once with this exit code; with one process nothing happens.

    For a process that failed. The usual way out waits for the others, which wait for this one's part of a step; when
    JAX gives up on that it aborts, and the exit code is lost.
    """
    if is_one_of_several():
        _flush()
        os._exit(code)


def abort() -> None:
    """Leave by SIGABRT, as JAX itself does when it loses a process. Launchers start the run again."""
    _flush()
    os.kill(os.getpid(), signal.SIGABRT)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
