"""Renders chat templates, which are programs from the target's folder, without trusting them.

A separate process (template_process.py) renders them. It starts at the first row, and the kernel limits its processor
time and memory. If the kernel ends it, it is started again for the next row.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.runtime.errors import DominoError

PROGRAM = Path(__file__).with_name("template_process.py")


class TemplateRefused(Exception):
    """A chat template failed, exceeded a limit, or uses something that no chat template needs."""


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The template's text for JSON messages and further `variables`.

    Raises:
        TemplateRefused: the template is at fault.
        DominoError: templates cannot be rendered here.
    """
    request = {"template": template, "messages": list(messages), "variables": dict(variables)}
    answer = _RENDERER.ask(json.dumps(request).encode() + b"\n")
    if "refused" in answer:
        raise TemplateRefused(_printable(answer["refused"]))
    return answer["text"]


def _printable(reason: str) -> str:
    """On one line: the template words its own errors."""
    return "".join(letter if letter.isprintable() else " " for letter in reason)


class _Renderer:
    """The process that renders for all threads of this one."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = 0  # the process that started it; a fork has to start another

    def ask(self, request: bytes) -> dict[str, str]:
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._process, self._owner = _start(), os.getpid()
            try:
                answer = self._exchange(request)
            except BaseException:  # Ctrl-C: the next row would read this answer
                self._end()
                raise
            if answer.endswith(b"\n"):
                return json.loads(answer)
            raise _failure(*self._end())

    def _exchange(self, request: bytes) -> bytes:
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except BrokenPipeError:  # it failed to start
            return b""
        return self._process.stdout.readline()

    def _end(self) -> tuple[int, str]:
        """Ends the process and returns its exit code and the last line of its errors."""
        process, self._process = self._process, None
        process.stdout.close()
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
        if process.poll() is None:
            process.kill()
        with process.stderr as stderr:
            lines = stderr.read().decode(errors="replace").strip().splitlines()
        return process.wait(), lines[-1] if lines else "no reason given"

    def close(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._end()


def _start() -> subprocess.Popen:
    # A preloaded allocator (on TPU machines) may reserve more address space than the process may have.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # A separate session: Ctrl-C at the terminal is for this process, which ends the other.
    return subprocess.Popen([sys.executable, "-P", PROGRAM], env=environment, start_new_session=True, **pipes)


def _failure(code: int, line: str) -> Exception:
    if code == -signal.SIGPROF:
        return TemplateRefused("it computes without coming to an end")
    if code < 0:
        return TemplateRefused(f"rendering it ended with signal {-code}")
    if line.startswith("MemoryError"):
        return TemplateRefused("it needs too much memory")
    return DominoError(f"chat templates cannot be rendered here ({_printable(line)}); is jinja2 installed?")


_RENDERER = _Renderer()
atexit.register(_RENDERER.close)
