"""Starts the processes of one run, keeps a log of each, and starts all of them again when that can help.

Exit codes (README, "Exit codes"): after 42 (saved, then left) and after death by a signal all processes start again, as
often as allowed; any other failure ends the launcher with that code. Nothing but its own children is ever signalled.
"""

import contextlib
import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

SAVED = 42
POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Rank:
    """One process to be: its words, what it finds in the environment besides ours, and where its output goes."""

    command: Sequence[str]
    environment: dict[str, str]
    log: pathlib.Path

    def __str__(self) -> str:
        """The process as a line of shell."""
        environment = [f"{name}={value}" for name, value in self.environment.items()]
        words = ["env", *environment] if environment else []
        return f"{shlex.join([*words, *self.command])} >> {shlex.quote(str(self.log))} 2>&1 &"


def keep_running(
    ranks: Callable[[], Sequence[Rank]],
    max_restarts: int,
    grace: float,
    again: Collection[int] = (SAVED,),
) -> int:
    """Run all ranks until they are done; the exit code for the shell.

    Args:
      ranks: makes the processes of one attempt, so that each has a port of its own.
      max_restarts: attempts after the first.
      grace: seconds that the others have to leave by themselves after the first failure, or after a signal to us.
      again: exit codes after which a new attempt is made; death by a signal is always one.
    """
    attempt = 0
    with _passed_on_signals() as signals:
        while True:
            code = _verdict(_run(ranks(), grace, signals), again)
            if code == 0 or not (code < 0 or code in again) or signals.received or attempt == max_restarts:
                return 128 - code if code < 0 else code
            attempt += 1
            why = f"signal {-code}" if code < 0 else f"exit code {code}"
            print(f"launch: ended by {why}; start {attempt} of {max_restarts} again", file=sys.stderr, flush=True)


class _Signals:
    """What came to the launcher, and the children it is passed on to."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.children: list[subprocess.Popen] = []

    def __call__(self, number: int, frame: object) -> None:
        self.received = number
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)


@contextlib.contextmanager
def _passed_on_signals() -> Iterator[_Signals]:
    signals = _Signals()
    before = {number: signal.signal(number, signals) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(ranks: Sequence[Rank], grace: float, signals: _Signals) -> list[int]:
    """One attempt: the exit codes in the order of leaving, without those of processes we had to kill."""
    children = signals.children = [_start(rank, echo=index == 0) for index, rank in enumerate(ranks)]
    codes: dict[int, int] = {}
    killed: set[int] = set()
    deadline = None
    try:
        while len(codes) < len(children):
            for index, child in enumerate(children):
                if index not in codes and child.poll() is not None:
                    codes[index] = child.returncode
            if deadline is None and (signals.received or any(codes.values())):
                deadline = time.monotonic() + grace
            if deadline is not None and time.monotonic() > deadline:
                killed |= {index for index in range(len(children)) if index not in codes}
                _kill(children)
            time.sleep(POLL_SECONDS)
    finally:
        _kill(children)
    for child in children:
        if child.echo is not None:
            child.echo.join()
    return [code for index, code in codes.items() if index not in killed]


def _verdict(codes: Sequence[int], again: Collection[int]) -> int:
    """One code for all: a failure that names itself first, for the signals around it are its consequence."""
    plain = [code for code in codes if code > 0 and code not in again]
    return next(iter(plain or [code for code in codes if code]), 0)


def _start(rank: Rank, echo: bool) -> subprocess.Popen:
    rank.log.parent.mkdir(parents=True, exist_ok=True)
    with rank.log.open("ab") as log:
        # A session of its own: Ctrl-C reaches a process through us alone, and its workers can be ended with it.
        child = subprocess.Popen(
            rank.command,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **rank.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if echo else log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    child.echo = threading.Thread(target=_copy, args=(child.stdout, rank.log)) if echo else None
    if child.echo is not None:
        child.echo.start()
    return child


def _copy(stream, log: pathlib.Path) -> None:
    """The first process is seen here as well as in its log."""
    with stream, log.open("ab", buffering=0) as file:
        while piece := stream.read1():
            file.write(piece)
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()


def _kill(children: Sequence[subprocess.Popen]) -> None:
    """End what is left of our children and of the processes that they started."""
    for child in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
