"""The run on one machine of several, for launch.ssh, launch.tpu_vm and launch.queued_resources.

    python3 -m launch.host [--tether] [--max_restarts=N] -- COMMAND
    python3 -m launch.host --stop

Only one run at a time is on a machine: a second one waits for the end of the first, and ends with exit code 2. The
lock is ~/.domino_jax.HOST.lock, or the file that DOMINO_LOCK names.
Signals are passed on to the command. With --tether the standard input is the launcher's: when it ends, or is silent
for two minutes, the command gets SIGTERM, saves and leaves. Its output is also written to --log, and a connection that
breaks does not disturb it. --stop sends SIGTERM to this machine's run and waits for its end.

Needs Python 3.8 and no package: it also sets the environment up (launch/on_tpu.sh).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from launch import commands, restarts, signals, supervise

PATIENCE = 8 * supervise.BEAT_SECONDS
LEAVING = PATIENCE + restarts.GRACE  # a run whose launcher is gone has left after this many seconds


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--stop"]:
        return stop()
    parser = commands.parser_of("host", __doc__)
    parser.add_argument("--tether", action="store_true", help="end the command when the standard input ends")
    parser.add_argument("--max_restarts", type=int, default=0, help="0: the launcher starts again, not this machine")
    parser.add_argument("--wait", type=float, default=LEAVING, help="seconds for an earlier run to leave")
    parser.add_argument("--log", type=pathlib.Path, default=pathlib.Path("logs/host.log"))
    args = commands.parse(parser, words)
    rank = supervise.Rank(args.train, {}, args.log)
    if args.dry_run:
        commands.show([str(rank)])
        return 0
    with signals.passed_on() as received:
        if args.tether:
            threading.Thread(target=watch, args=(sys.stdin.fileno(),), daemon=True).start()
        with alone(args.wait, received) as is_alone:
            if not is_alone:
                return 128 + received.received if received.received else 2
            return supervise.keep_running(lambda: [rank], args.max_restarts, restarts.GRACE)


def watch(tether: int) -> None:
    """Stops this process when the launcher is gone: its end of the tether is closed or silent."""
    while select.select([tether], [], [], PATIENCE)[0] and os.read(tether, 4096):
        pass
    commands.say("the launcher is gone, stopping")
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def alone(seconds: float, received: signals.Stop) -> Iterator[bool]:
    """Hold this machine's lock while the block runs; False when another run keeps it for this long."""
    with open_lock() as file:
        end = time.monotonic() + seconds
        waits = not _try_lock(file)
        if waits:
            commands.say(
                f"{_name(file)} has a run on this machine; waiting {seconds:g} s for it to leave. "
                "python3 -m launch.host --stop ends it."
            )
        while waits and not received.wait(0.2) and time.monotonic() < end:
            waits = not _try_lock(file)
        if waits:
            if not received.received:
                commands.say(f"{_name(file)} still has a run on this machine: not started")
            yield False
            return
        _write_holder(file, str(os.getpid()))
        try:
            yield True
        finally:
            _write_holder(file, "")


def stop() -> int:
    """End this machine's run and wait until it has left: 0, or 1 when it did not."""
    signalled = False
    with open_lock() as file:
        end = time.monotonic() + restarts.GRACE + 10
        while not _try_lock(file):
            # A run that begins or ends has no number in the file, and after a crash it may be the last run's.
            if not signalled and (holder := _holder(file)):
                signalled = _terminate(holder)
            if time.monotonic() > end:
                commands.say(f"{_name(file)} did not leave")
                return 1
            time.sleep(0.2)
    commands.say("the run has left" if signalled else "no run on this machine")
    return 0


def open_lock() -> TextIO:
    path = lock_path()
    try:
        return path.open("a+")
    except OSError as error:
        commands.refuse(f"{path} cannot be opened: {error.strerror}. Let DOMINO_LOCK name another file.")


def lock_path() -> pathlib.Path:
    """The lock's file, with this machine's name: a home on NFS shares its files and their locks with other machines."""
    default = pathlib.Path.home() / f".domino_jax.{socket.gethostname()}.lock"
    return pathlib.Path(os.environ.get("DOMINO_LOCK") or default)


def _terminate(process: int) -> bool:
    """Send SIGTERM; False when there is no such process."""
    try:
        os.kill(process, signal.SIGTERM)
    except ProcessLookupError:
        return False
    except PermissionError:
        commands.refuse(f"process {process} belongs to another user: stop it as that user.")
    return True


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_holder(file: TextIO, text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def _holder(file: TextIO) -> int | None:
    """The process whose run this is; None when the file does not say."""
    file.seek(0)
    text = file.read()
    return int(text) if text.isdecimal() else None


def _name(file: TextIO) -> str:
    holder = _holder(file)
    return f"process {holder}" if holder else "another process"


if __name__ == "__main__":
    sys.exit(main())
