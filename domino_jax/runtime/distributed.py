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

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import jax

from domino_jax.runtime.agreement import barrier
from domino_jax.runtime.errors import DominoError, first_line

BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LOOPBACK = "127.0.0.1"
INIT_SECONDS = 50  # a wrong environment is reported within a minute
HEARTBEAT_SECONDS = 100  # JAX's own
SHUTDOWN_SECONDS = 60  # the processes leave together, see shutdown()
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
      DominoError: a variable is missing or wrong, the port is taken, another process or the
        requested device is missing. When the others do not come at all, JAX would abort; the process leaves with the
        same exit code 2.
    """
    if jax.distributed.is_initialized():
        return
    jax.config.update("jax_enable_preemption_service", preemptible)
    if mode != "off":
        _connect(mode)
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
    if is_loss(error):
        print("error: another process of this run was lost; start all of them again.", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGABRT)
    _leave_now(code)


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


def _leave_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_after_traceback(kind, error, trace) -> None:
    sys.__excepthook__(kind, error, trace)
    leave(1, error)


# ---------------------------------------------------------------- the connection


def _connect(mode: str) -> None:
    seconds = _whole("DOMINO_INIT_SECONDS", INIT_SECONDS, least=1)
    given = [name for name in BY_HAND if os.environ.get(name)]
    if mode == "manual" or given:
        missing = [name for name in BY_HAND if name not in given]
        if missing:
            raise DominoError(
                f"{missing[0]} is not set{f', {given[0]} is' if given else ''}: set all of {', '.join(BY_HAND)}"
                f"{' (or none of them, and JAX looks for a cluster)' if mode == 'auto' else ''}."
            )
        _connect_by_hand(seconds)
        return
    local = _one_slurm_node()
    place = {"coordinator_address": local, "coordinator_bind_address": local} if local else {}
    if not _start(seconds, "the cluster that JAX detected", **place):
        address = f"{LOOPBACK}:{free_port()}"
        _start(
            seconds,
            address,
            coordinator_address=address,
            coordinator_bind_address=address,
            num_processes=1,
            process_id=0,
            cluster_detection_method="deactivate",
        )


def _connect_by_hand(seconds: int) -> None:
    address = os.environ["JAX_COORDINATOR_ADDRESS"]
    count = _whole("JAX_NUM_PROCESSES", None, least=1)
    process = _whole("JAX_PROCESS_ID", None, least=0)
    if process >= count:
        raise DominoError(
            f"JAX_PROCESS_ID is {process}, JAX_NUM_PROCESSES is {count}: processes are numbered from 0 to {count - 1}."
        )
    host, port = _split(address, "JAX_COORDINATOR_ADDRESS")
    # JAX would listen on every interface; who names the loopback is served there alone.
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or (address if _is_loopback(host) else None)
    if process == 0:
        bind_host, bind_port = _split(bind, "JAX_COORDINATOR_BIND_ADDRESS") if bind else ("", port)
        _refuse_taken_port(bind_host, bind_port, "JAX_COORDINATOR_BIND_ADDRESS" if bind != address else BY_HAND[0])
    _start(
        seconds,
        f"JAX_COORDINATOR_ADDRESS={address}",
        coordinator_address=address,
        coordinator_bind_address=bind,
        num_processes=count,
        process_id=process,
        cluster_detection_method="deactivate",
    )


def _start(seconds: int, what: str, **place) -> bool:
    """jax.distributed.initialize in bounded time; False when JAX detected no cluster to take the place from."""
    if _is_loopback(str(place.get("coordinator_address", "")).rpartition(":")[0]):
        _go_round_proxies()
    waited = f"waited {seconds} s for all processes at {what}"
    with _deadline(seconds, f"{waited}: start every one of them, or raise DOMINO_INIT_SECONDS.{_proxies()}"):
        try:
            jax.distributed.initialize(
                **place,
                # Above ours: what JAX does at the end of its patience is to abort.
                initialization_timeout=seconds + 30,
                heartbeat_timeout_seconds=_whole("DOMINO_HEARTBEAT_SECONDS", HEARTBEAT_SECONDS, least=1),
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
        except (ValueError, KeyError, RuntimeError, OSError) as error:
            if not place and "coordinator_address should be defined" in str(error):
                return False
            if "must be called before" in str(error):
                raise DominoError(
                    "jax has used a device before the processes were connected: call initialize first, or pass "
                    "--distributed=off."
                ) from error
            raise DominoError(
                f"{what}: {first_line(error, with_class=False)} Set {', '.join(BY_HAND)}, or pass --distributed=off."
            ) from error
    return True


@contextlib.contextmanager
def _deadline(seconds: float, message: str) -> Iterator[None]:
    """Leave with exit code 2 when the block takes longer: JAX blocks in C++, where no exception of ours reaches it."""

    def give_up() -> None:
        print(f"error: {message}", file=sys.stderr)
        if os.environ.get("DOMINO_RESTARTED"):
            sys.stdout.flush()
            sys.stderr.flush()
            os.abort()
        _leave_now(DominoError.exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _one_slurm_node() -> str | None:
    """The loopback address for a Slurm step on one node, where JAX would listen on every interface; else None."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if not nodes:
        if tasks != "1":
            raise DominoError(
                f"SLURM_NTASKS is {tasks} but SLURM_STEP_NODELIST is not set: start the command with srun, or pass "
                "--distributed=off."
            )
        return None
    if "," in nodes or "[" in nodes or "SLURM_PROCID" not in os.environ:
        return None
    # Every task of the job comes to the same port without having to ask for it; above 61440 as JAX does it.
    port = _whole("JAX_COORDINATOR_PORT", 61_440 + _whole("SLURM_JOB_ID", 0, least=0) % 4_096, least=1)
    if os.environ["SLURM_PROCID"] == "0":
        _refuse_taken_port(LOOPBACK, port, "JAX_COORDINATOR_PORT")
    return f"{LOOPBACK}:{port}"


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


def _refuse_taken_port(host: str, port: int, variable: str) -> None:
    """JAX's server ends in a segmentation fault on a port that is taken."""
    try:
        family = socket.getaddrinfo(host or LOOPBACK, port)[0][0]
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        raise DominoError(
            f"{variable}: process 0 cannot listen on {host or 'any address'}:{port} ({error.strerror or error}); name "
            "an address of this machine and a free port."
        ) from error


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
        expected = _whole(name, count, least=1)
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


# ---------------------------------------------------------------- small readers


def _whole(name: str, default: int | None, least: int) -> int:
    """A whole number from the environment; with default None the variable is known to be set."""
    text = os.environ.get(name)
    if not text:
        return default
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise DominoError(f"{name} is {text!r}: set it to a whole number, {least} or more.")
    return int(text)


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"


def _split(address: str, variable: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6 host]:port"."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65_536):
        raise DominoError(f"{variable} is {address!r}: write it as HOST:PORT, for example 10.0.0.1:8476.")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _go_round_proxies() -> None:
    """gRPC sends even the loopback through http_proxy, and then waits for ever, unless no_proxy names it."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if _proxies():
        os.environ["no_proxy"] = ",".join(filter(None, (known, LOOPBACK, "localhost")))


def _proxies() -> str:
    found = sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy"))
    return f" {', '.join(found)} may block the connection: unset it." if found else ""
