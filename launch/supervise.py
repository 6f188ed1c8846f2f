"""Starts the processes of one run, keeps a log of each, and starts all of them again when that can help.

The rules are those of launch/restarts.py. Nothing but its own children is ever signalled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

from launch import commands, restarts, signals

BEAT_SECONDS = 15


@dataclasses.dataclass(frozen=True)
class Rank:
    """One process to be: its words, what it finds in the environment besides ours, and where its output goes.

    tethered: the command passes its standard input to launch.host --tether on another machine. It gets a line every
    BEAT_SECONDS, and the end of its input is what stops it.
    """

    command: Sequence[str]
    environment: dict[str, str]
    log: pathlib.Path
    tethered: bool = False

    def __str__(self) -> str:
        """The process as a line of shell."""
        environment = [f"{name}={value}" for name, value in self.environment.items()]
        words = ["env", *environment] if environment else []
        return f"{shlex.join([*words, *self.command])} >> {shlex.quote(str(self.log))} 2>&1 &"


def keep_running(
    ranks: Callable[[], Sequence[Rank]],
    max_restarts: int,
    grace: float,
    again: Callable[[int], bool] = restarts.starts_again,
) -> int:
    """Run all ranks until they are done; the exit code for the shell.

    Args:
      ranks: makes the processes of one attempt, so that each has a new port.
      max_restarts: attempts after the first.
      grace: seconds that the others have to leave by themselves after the first failure, or after a signal to us.
      again: whether a new attempt is made after this exit code.
    """
    pauses = restarts.Pauses()
    attempt = 0
    with signals.passed_on() as stop:
        while True:
            started = time.monotonic()
            attempted = ranks()
            if not attempted:
                commands.refuse("there is no machine to run on.")
            if stop.received:
                return 128 + stop.received
            code = restarts.verdict(_run(attempted, grace, stop), again)
            if stop.received or not (code and again(code)) or attempt == max_restarts:
                return code
            attempt += 1
            pause = pauses.after(time.monotonic() - started)
            commands.say(f"ended with exit code {code}; start {attempt} of {max_restarts} again in {pause:g} s")
            if stop.wait(pause):
                return code


class _Child:
    """A running rank."""

    def __init__(self, rank: Rank, echo: bool) -> None:
        with _open_log(rank.log) as log, commands.refusing_to_start(rank.command[0]):
            # In a separate session: Ctrl-C reaches a process through us alone, and its workers can be ended with it.
            self.process = subprocess.Popen(
                rank.command,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **rank.environment},
                stdin=subprocess.PIPE if rank.tethered else subprocess.DEVNULL,
                stdout=subprocess.PIPE if echo else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._beat = time.monotonic()
        self._echo = threading.Thread(target=_copy, args=(self.process.stdout, rank.log)) if echo else None
        if self._echo is not None:
            self._echo.start()

    def poll(self) -> int | None:
        """The exit code, None while it runs; keeps the tether alive."""
        tether = self.process.stdin
        if tether and not tether.closed and time.monotonic() > self._beat + BEAT_SECONDS:
            self._beat = time.monotonic()
            with contextlib.suppress(OSError):
                os.write(tether.fileno(), b"\n")
        code = self.process.poll()
        return None if code is None else restarts.shell_code(code)

    def stop(self, number: int) -> None:
        """Pass a signal on; the first one closes a tethered process's input instead, the second ends the connection."""
        tether = self.process.stdin
        if tether and not tether.closed:
            with contextlib.suppress(OSError):
                tether.close()
        elif self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """End what is left of the process and of those that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.kill()
        if self._echo is not None:
            self._echo.join()
        if self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


def _run(ranks: Sequence[Rank], grace: float, stop: signals.Stop) -> list[int]:
    """One attempt: the exit codes in the order of leaving."""
    children: list[_Child] = []
    codes: dict[int, int] = {}
    deadline, passed_on = None, 0
    try:
        for rank in ranks:  # when one of them cannot start, the others are ended
            children.append(_Child(rank, echo=not children))
        while len(codes) < len(children):
            for number in stop.all[passed_on:]:
                passed_on += 1
                for child in children:
                    child.stop(number)
            for index, child in enumerate(children):
                if index not in codes and (code := child.poll()) is not None:
                    codes[index] = code
            if deadline is None and (stop.received or any(codes.values())):
                deadline = time.monotonic() + grace
            if deadline is not None and time.monotonic() > deadline:
                for child in children:
                    child.kill()
            time.sleep(signals.POLL_SECONDS)
    finally:
        for child in children:
            child.close()
    return list(codes.values())


def _open_log(path: pathlib.Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError as error:
        commands.refuse(f"{path} cannot be written: {error.strerror}. Name another folder or file for the logs.")


def _copy(stream: BinaryIO, log: pathlib.Path) -> None:
    """The first process is seen here as well as in its log; a closed terminal, pipe or full disk ends one alone."""
    with stream, log.open("ab", buffering=0) as file:
        while piece := stream.read1():
            commands.write(file.fileno(), piece)
            commands.write(1, piece)
