"""How this process finds the others of its run: placed by hand, as JAX detects a cluster, or alone on the loopback.

distributed.py lists the environment that is read here.
"""

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator

import jax

from domino_jax.runtime.errors import DominoError, first_line

BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LOOPBACK = "127.0.0.1"
INIT_SECONDS = 50  # a wrong environment is reported within a minute
HEARTBEAT_SECONDS = 100  # JAX's own
ALONE_SECONDS = 365 * 24 * 3600  # a process alone is never lost: a suspended laptop must not end its run
SHUTDOWN_SECONDS = 60  # the processes leave together, see distributed.shutdown()


def connect(mode: str) -> None:
    """Starts JAX's services with the place of this process; modes as in `distributed.initialize`.

    Raises:
        DominoError: a variable is missing or wrong, or the port is taken. When the others do not come in time, the
            process leaves with the same exit code 2.
    """
    seconds = whole_number("DOMINO_INIT_SECONDS", INIT_SECONDS, least=1)
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
    count = whole_number("JAX_NUM_PROCESSES", None, least=1)
    process = whole_number("JAX_PROCESS_ID", None, least=0)
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
    heartbeat = whole_number("DOMINO_HEARTBEAT_SECONDS", HEARTBEAT_SECONDS, least=1)
    if place.get("num_processes") == 1:
        heartbeat = ALONE_SECONDS
    waited = f"waited {seconds} s for all processes at {what}"
    with _deadline(seconds, f"{waited}: start every one of them, or raise DOMINO_INIT_SECONDS.{_proxies()}"):
        try:
            jax.distributed.initialize(
                **place,
                # Above ours: what JAX does at the end of its patience is to abort.
                initialization_timeout=seconds + 30,
                heartbeat_timeout_seconds=heartbeat,
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
        sys.stdout.flush()
        sys.stderr.flush()
        if os.environ.get("DOMINO_RESTARTED"):
            os.abort()
        os._exit(DominoError.exit_code)

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
    port = whole_number("JAX_COORDINATOR_PORT", 61_440 + whole_number("SLURM_JOB_ID", 0, least=0) % 4_096, least=1)
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


# ---------------------------------------------------------------- small readers


def whole_number(name: str, default: int | None, least: int) -> int:
    """A whole number from the environment; with default None the variable is known to be set."""
    text = os.environ.get(name)
    if not text:
        return default
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise DominoError(f"{name} is {text!r}: set it to a whole number, {least} or more.")
    return int(text)


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
