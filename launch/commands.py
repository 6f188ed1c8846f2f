"""Shared by all launchers: their own flags before `--`, the train command after it, commands shown or run.

A command is a list of words. It becomes text only here, each word quoted, so a name with a space or a semicolon stays
one word in every shell on the way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

from launch import restarts, signals

ROOT = pathlib.Path(__file__).resolve().parents[1]


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a launcher, its description printed as it is written."""
    return argparse.ArgumentParser(name, description=description, formatter_class=argparse.RawTextHelpFormatter)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """--env and --max_restarts, which most launchers have."""
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--max_restarts", type=int, default=restarts.MAX_RESTARTS)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, stoppable: bool = False) -> argparse.Namespace:
    """The launcher's flags, with dry_run and train (the words after `--`) added; a mistake exits with code 2.

    stoppable: adds --stop, which needs no train command.
    """
    parser.add_argument("--dry_run", action="store_true", help="print the exact commands and run none")
    parser.usage = f"python -m launch.{parser.prog} [flags] -- python -m domino_jax.train ..."
    if stoppable:
        parser.add_argument("--stop", action="store_true", help="end the run on its machines: it saves and leaves")
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.train = words[end + 1 :]
    if not args.train and not (stoppable and args.stop):
        parser.error("no command: write it after --, as -- python -m domino_jax.train --config=... --workdir=...")
    return args


def assignments(texts: Sequence[str]) -> list[str]:
    """NAME=VALUE texts as they are, each checked; for `env` in front of a command."""
    for text in texts:
        if not text.partition("=")[0].isidentifier() or "=" not in text:
            refuse(f"--env={text}: write it as NAME=VALUE.")
    return list(texts)


def settings(env: Sequence[str]) -> list[str]:
    """NAME=VALUE words for a run whose machines may come late and are started again; env, checked, comes after."""
    return [*(f"{name}={value}" for name, value in restarts.ENVIRONMENT.items()), *assignments(env)]


def kubernetes(word: str) -> str:
    """A word of a container's command: Kubernetes puts variables in the place of $(NAME), and reads $$ as a dollar."""
    return word.replace("$", "$$")


def here_document(command: Sequence[str], text: str, tail: str = "") -> str:
    """A command that reads text on its standard input, as shell."""
    return f"{shlex.join(command)}{tail} <<'END'\n{text.rstrip()}\nEND"


def show(commands: Sequence[Sequence[str] | str]) -> None:
    """Print commands as shell, one below the other; a text is printed as it is."""
    for command in commands:
        print(command if isinstance(command, str) else shlex.join(command))


def show_or_run(args: argparse.Namespace, command: Sequence[str]) -> int:
    """With --dry_run the command is printed, else run; its exit code."""
    if args.dry_run:
        show([command])
        return 0
    return run(command)


def refuse(text: str) -> NoReturn:
    """End the launcher because of the user's mistake, before anything is changed."""
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def say(text: str) -> None:
    """A line of the launcher itself; a closed terminal does not end it."""
    write(2, f"launch: {text}\n".encode())


def write(descriptor: int, text: bytes) -> None:
    """Write past Python's buffers, which a closed pipe would make fail once more at the end."""
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(descriptor, text) :]


@contextlib.contextmanager
def refusing_to_start(program: str) -> Iterator[None]:
    """End the launcher with one sentence when the program that the block starts cannot be started."""
    try:
        yield
    except FileNotFoundError:
        refuse(f"{program} is not installed, or not on the PATH.")
    except OSError as error:
        refuse(f"{program} cannot be started: {error.strerror}.")


def run(command: Sequence[str], text: str | None = None) -> int:
    """Run a command in the repository's root, text on its standard input; its exit code.

    A signal ends the launcher as soon as the command has left.
    """
    say(shlex.join(command))
    with signals.passed_on() as stop:
        with refusing_to_start(command[0]):
            child = subprocess.Popen(command, cwd=ROOT, stdin=None if text is None else subprocess.PIPE, text=True)
        if text is not None:
            with contextlib.suppress(BrokenPipeError), child.stdin:
                child.stdin.write(text)
        code = _wait(child, stop)
        if stop.received:
            raise SystemExit(code or 128 + stop.received)
    return code


def _wait(child: subprocess.Popen, stop: signals.Stop) -> int:
    """The child's exit code. A terminal sends Ctrl-C to the child as well, so it gets a second to leave by itself."""
    passed_on_at, deadline = None, None
    while (code := child.poll()) is None:
        if stop.received and deadline is None:
            passed_on_at, deadline = time.monotonic() + 1, time.monotonic() + restarts.GRACE
        if passed_on_at and time.monotonic() > passed_on_at:
            child.send_signal(stop.received)
            passed_on_at = None
        if deadline and time.monotonic() > deadline:
            child.kill()
        time.sleep(signals.POLL_SECONDS)
    return restarts.shell_code(code)


def read(command: Sequence[str]) -> str | None:
    """The output of a command, stripped; None when it fails or is not installed."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def run_all(commands: Sequence[Sequence[str]]) -> int:
    """Run commands one after the other until one fails: its exit code, or 0."""
    return next((code for command in commands if (code := run(command))), 0)


def must(commands: Sequence[Sequence[str]]) -> None:
    """Run commands one after the other; the first that fails ends the launcher with its exit code."""
    if code := run_all(commands):
        raise SystemExit(code)
