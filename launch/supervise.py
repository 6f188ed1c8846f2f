"""Starts the processes of one run, keeps a log of each, and starts all of them again when that can help.

It follows the rules of launch/restarts.py and signals only its own children.
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
LOST = 255  # ssh's own code, for a connection that was lost and for one that was never there
# A 255 of the first attempt within these seconds is a wrong name or a refused key, which no restart mends. Looking up a
# name that does not exist can take half of them.
CONTACT_SECONDS = 30
UNREACHABLE = 2
TAIL_LINES = 5


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


class NotReady(Exception):
    """The machines could not be prepared: a command ended with this exit code. Another attempt may succeed."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def keep_running(
    ranks: Callable[[], Sequence[Rank]],
    max_restarts: int,
    grace: float,
    again: Callable[[int], bool] = restarts.starts_again,
) -> int:
    """Run all ranks until they are done; the exit code for the shell.

    Args:
      ranks: makes the processes of one attempt, so that each has a new port. It may raise NotReady, which is final in
        the first attempt and counts as a failed attempt later.
      max_restarts: attempts after the first.
      grace: seconds that the others have to leave by themselves after the first failure, or after a signal to us.
      again: whether a new attempt is made after this exit code.
    """
    pauses = restarts.Pauses()
    attempt = 0
    with signals.passed_on() as stop:
        while True:
            started = time.monotonic()
            code, may_repeat = _attempt(ranks, grace, stop, again, is_first=attempt == 0)
            if not may_repeat or attempt == max_restarts:
                return code
            attempt += 1
            pause = pauses.after(time.monotonic() - started)
            commands.say(f"ended with exit code {code}; start {attempt} of {max_restarts} again in {pause:g} s")
            if stop.wait(pause):
                return code


def _attempt(
    ranks: Callable[[], Sequence[Rank]], grace: float, stop: signals.Stop, again: Callable[[int], bool], is_first: bool
) -> tuple[int, bool]:
    """The exit code of one attempt, and whether there may be another one."""
    try:
        attempted = ranks()
    except NotReady as failure:
        return failure.code, not is_first
    if not attempted:
        commands.refuse("there is no machine to run on.")
    if stop.received:
        return 128 + stop.received, False
    code = restarts.verdict(_run(attempted, grace, stop, CONTACT_SECONDS if is_first else 0), again)
    return code, not stop.received and code != 0 and again(code)


class _Child:
    """A running rank; contact: the seconds in which a failing connection means that it was never there."""

    def __init__(self, rank: Rank, echo: bool, contact: float) -> None:
        self._log, self._contact = rank.log, contact
        self.unreachable = False
        with _open_log(rank.log) as log, commands.refusing_to_start(rank.command[0]):
            self._log_start = os.fstat(log.fileno()).st_size
            # In a separate session: Ctrl-C reaches a process through us alone, and its workers can be ended with it.
            self.process = subprocess.Popen(
                rank.command,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **rank.environment},
                stdin=subprocess.PIPE if rank.tethered else subprocess.DEVNULL,
                stdout=subprocess.PIPE if echo else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._began = self._beat = time.monotonic()
        self._echo = threading.Thread(target=_copy, args=(self.process.stdout, rank.log)) if echo else None
        if self._echo is not None:
            self._echo.start()

    def poll(self) -> int | None:
        """The exit code, None while it runs; keeps the tether alive."""
        tether = self.process.stdin
        is_tethered = tether is not None and not tether.closed
        if is_tethered and time.monotonic() > self._beat + BEAT_SECONDS:
            self._beat = time.monotonic()
            with contextlib.suppress(OSError):
                os.write(tether.fileno(), b"\n")
        code = self.process.poll()
        if code == LOST and is_tethered and time.monotonic() < self._began + self._contact:
            self.unreachable = True
            commands.say(
                f"no connection (exit code {LOST}). Check the host's name and the ssh key. The end of {self._log}:\n"
                f"{self._tail()}"
            )
            return UNREACHABLE
        return None if code is None else restarts.shell_code(code)

    def _tail(self) -> str:
        """The last lines that this process has written."""
        if self._echo is not None:
            self._echo.join(1)  # second, not for ever: what ssh has started may keep the pipe open
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])

    def stop(self, number: int) -> None:
        """Pass a signal on; the first one closes a tethered process's input instead, the second ends the connection."""
        tether = self.process.stdin
        if tether and not tether.closed:
            with contextlib.suppress(OSError):
                tether.close()
        elif self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Ends the rest of the process and of the processes that it started."""
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


def _run(ranks: Sequence[Rank], grace: float, stop: signals.Stop, contact: float) -> list[int]:
    """One attempt: the exit codes in the order of leaving; contact is that of _Child."""
    children: list[_Child] = []
    codes: dict[int, int] = {}
    deadline, passed_on = None, 0
    try:
        for rank in ranks:  # when one of them cannot start, the others are ended
            children.append(_Child(rank, echo=not children, contact=contact))
        while len(codes) < len(children):
            for number in stop.all[passed_on:]:
                passed_on += 1
                for child in children:
                    child.stop(number)
            for index, child in enumerate(children):
                if index not in codes and (code := child.poll()) is not None:
                    codes[index] = code
            if deadline is None and (stop.received or any(codes.values())):
                # The others wait for a machine that cannot be reached, and have nothing to save yet.
                deadline = time.monotonic() + (0 if any(child.unreachable for child in children) else grace)
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
