"""What every launcher does alike: its own flags before `--`, the train command behind it, commands shown or run.

A command is a list of words. It becomes text only here, each word quoted, so a name with a space or a semicolon stays
one word in every shell on the way.
"""

import argparse
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The launcher's flags, with dry_run and train (the words behind `--`) added; a mistake exits with code 2."""
    parser.add_argument("--dry_run", action="store_true", help="print the exact commands and run none")
    parser.usage = f"python -m launch.{parser.prog} [flags] -- python -m domino_jax.train ..."
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.train = words[end + 1 :]
    if not args.train:
        parser.error("no command: write it behind --, as -- python -m domino_jax.train --config=... --workdir=...")
    return args


def assignments(texts: Sequence[str]) -> list[str]:
    """NAME=VALUE texts as they are, each checked; for `env` in front of a command."""
    for text in texts:
        if not text.partition("=")[0].isidentifier() or "=" not in text:
            raise SystemExit(f"--env={text}: write it as NAME=VALUE.")
    return list(texts)


def here_document(command: Sequence[str], text: str, tail: str = "") -> str:
    """A command that reads text on its standard input, as shell."""
    return f"{shlex.join(command)}{tail} <<'END'\n{text.rstrip()}\nEND"


def show(commands: Sequence[Sequence[str] | str]) -> None:
    """Print commands as shell, one below the other; a text is printed as it is."""
    for command in commands:
        print(command if isinstance(command, str) else shlex.join(command))


def run(command: Sequence[str], text: str | None = None) -> int:
    """Run a command in the repository's root, text on its standard input; its exit code."""
    print("+", shlex.join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, input=text, text=True, check=False).returncode


def read(command: Sequence[str]) -> str | None:
    """What a command prints, stripped; None when it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def must(commands: Sequence[Sequence[str]]) -> None:
    """Run commands one after the other; the first that fails ends the launcher with its exit code."""
    for command in commands:
        code = run(command)
        if code:
            raise SystemExit(code)
