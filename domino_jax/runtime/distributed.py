"""Starting the processes of one run: the one place that decides how jax.distributed begins, and how a process leaves.

    initialize("auto")     before the first use of a device; also a run of one process starts JAX's services, because
                           JAX hears SIGTERM only through them (docs/launch.md)

The environment, all of it optional:

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID   the three that place this process by hand
    DOMINO_NUM_PROCESSES, DOMINO_NUM_DEVICES                     what must have come up, or the start is refused
    DOMINO_INIT_SECONDS (50), DOMINO_HEARTBEAT_SECONDS (100)     patience at the start, and with a silent process later
    DOMINO_RESTARTED                                             set by launchers that start lost processes again:
                                                                 those that do not come in time count as lost
"""

import os
import re
import signal
import sys

import jax

from domino_jax.runtime.agreement import barrier
from domino_jax.runtime.connection import connect, whole_number
from domino_jax.runtime.errors import DominoError, first_line

# Errors of JAX's runtime about a program or its size, which would come again; all others are about the machines.
OWN_FAULTS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
# A broken collective is a ValueError when it fails while it is dispatched, and Orbax turns a broken barrier into a
# TimeoutError. Both are recognised by their text, because files that cannot be read or written raise the same classes.
PEER = re.compile(r"\bGloo\b|\bNCCL\b|\bnccl[A-Z]|[Bb]arrier|[Cc]oordination ?[Ss]ervice|[Hh]eartbeat")


def initialize(mode: str = "auto", preemptible: bool = True) -> None:
    """Connect this process with the others of its run and check what came up; a second call does nothing.

    Args:
      mode: off: this process alone, without JAX's services. manual: the three JAX_ variables name address, number and
        place. auto: the same if one of them is set, else what JAX detects (Cloud TPU, Slurm, Open MPI, Kubernetes),
        else one process on the loopback.
      preemptible: JAX holds SIGTERM back until preemption.py asks for it. False: it ends the process, as is right
        for a command that never asks.

    Raises:
      DominoError: a variable is missing or wrong, the port is taken, another process or the requested device is
        missing. When the others do not come at all, JAX would abort; the process leaves with the same exit code 2.
    """
    if jax.distributed.is_initialized():
        return
    jax.config.update("jax_enable_preemption_service", preemptible)
    if mode != "off":
        connect(mode)
    devices = _devices()
    _check_counts(devices)
    _check_network()
    if jax.process_count() > 1:
        sys.excepthook = _leave_after_traceback
    if is_primary():
        kinds = ", ".join(sorted({device.device_kind for device in devices}))
        counts = f"{_count(jax.process_count(), 'process', 'es')}, {_count(len(devices), 'device', 's')}"
        print(f"topology: {counts} ({kinds})", flush=True)


def meant_for_several(mode: str) -> str | None:
    """The flag or variable that makes this process one of several, before anything is connected; None without one."""
    if mode == "manual":
        return "--distributed=manual"
    count = os.environ.get("JAX_NUM_PROCESSES", "").strip()
    return f"JAX_NUM_PROCESSES={count}" if mode == "auto" and count not in ("", "1") else None


def is_primary() -> bool:
    """True in the one process that writes files and prints."""
    return jax.process_index() == 0


def shutdown() -> None:
    """The end of a run that went well: wait for the others, then close JAX's services. No device is used after it."""
    if not jax.distributed.is_initialized():
        return
    # JAX's own goodbye has a time limit, and one process may still write the report while the others are done.
    barrier("shutdown")
    jax.distributed.shutdown()


def leave(code: int, error: BaseException | None = None) -> None:
    """Leave a run of several processes at once with this exit code; with one process nothing happens.

    For a process that failed. The usual way out waits for the others, which wait for this one's part of a step; when
    JAX gives up on that it aborts, and the exit code is lost.

    Args:
      code: the exit code.
      error: the reason. When another process was lost (is_loss), this one leaves by SIGABRT instead, as JAX itself
        does then: launchers answer a signal with a new start.
    """
    if not (jax.distributed.is_initialized() and _several()):
        return
    lost = is_loss(error)
    if lost:
        print(
            f"error: another process of this run was lost, or the runtime failed ({first_line(error)}); start all of"
            " them again.",
            file=sys.stderr,
        )
    sys.stdout.flush()
    sys.stderr.flush()
    if lost:
        os.kill(os.getpid(), signal.SIGABRT)
    os._exit(code)


def _several() -> bool:
    try:
        return jax.process_count() > 1
    except (RuntimeError, AssertionError):  # connected, but the requested device is missing
        return True


def is_loss(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, means that another process or its connection is gone.

    Everything that catches errors of collective work (steps, barriers, broadcasts, saves) asks here before it explains
    them in another way.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        if isinstance(error, jax.errors.JaxRuntimeError):
            return not str(error).startswith(OWN_FAULTS)
        if isinstance(error, ValueError | RuntimeError | TimeoutError) and PEER.search(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _leave_after_traceback(kind, error, trace) -> None:
    sys.__excepthook__(kind, error, trace)
    leave(1, error)


# ---------------------------------------------------------------- what came up


def _devices() -> list[jax.Device]:
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # an unknown or absent platform is either
        wanted = os.environ.get("JAX_PLATFORMS", "")
        reason = first_line(error, with_class=False)
        if not wanted:
            raise DominoError(
                f"jax found no device to compute on ({reason}); set JAX_PLATFORMS=cpu to go on without."
            ) from error
        raise DominoError(
            f"JAX_PLATFORMS is {wanted!r}, and jax finds no such device ({reason}). Install jax for it, as "
            'pip install "jax[cuda13]" or "jax[tpu]", or set JAX_PLATFORMS=cpu.'
        ) from error


def _check_counts(devices: list[jax.Device]) -> None:
    there = {"DOMINO_NUM_PROCESSES": jax.process_count(), "DOMINO_NUM_DEVICES": len(devices)}
    for name, count in there.items():
        expected = whole_number(name, count, least=1)
        if expected != count:
            raise DominoError(
                f"{name} is {expected}, but {count} came up: start the command on every machine of the run, or "
                f"correct {name}."
            )


def _check_network() -> None:
    """A network that connects but does not carry shows here, not in the first step."""
    try:
        barrier("start")
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if "by peer" in str(error):  # it was there a moment ago: a lost process, not the network
            raise
        raise DominoError(
            f"the processes are connected, but their devices cannot exchange numbers:\n"
            f"{first_line(error, with_class=False)}\nLook at the network between the machines."
        ) from None


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"
