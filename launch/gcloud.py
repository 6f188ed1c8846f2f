"""Questions of launch.tpu_vm and launch.queued_resources to gcloud, with a policy for missing answers."""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from launch import commands, restarts, signals

TRIES = 10


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the name, the place and the kind of a TPU."""
    parser.add_argument("--name", required=True)
    parser.add_argument("--zone", required=True)
    parser.add_argument("--type", required=True, help="accelerator type, as v5litepod-16")
    parser.add_argument("--version", required=True, help="TPU software version, as v2-alpha-tpuv5-lite")
    parser.add_argument("--project")
    commands.add_run_flags(parser)
    parser.add_argument("--delete", action="store_true", help="delete the machines at the end")


def ask(command: Sequence[str]) -> str | None:
    """The output of gcloud; None when the resource does not exist.

    Another failure (no network, no login, a service that is down) is tried again for some minutes; then it ends the
    launcher with exit code 2. The run of launch.queued_resources continues without it. A run of launch.tpu_vm
    has already ended when gcloud is called, because it is tethered to its launcher.
    """
    pauses = restarts.Pauses()
    with signals.passed_on() as stop:
        for tried in range(1, TRIES + 1):
            with commands.refusing_to_start(command[0]):
                done = subprocess.run(command, cwd=commands.ROOT, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
            if is_missing(done.stderr):
                return None
            pause = pauses.after(0)
            commands.say(f"gcloud failed, try {tried} of {TRIES}: {done.stderr.strip()[-500:]}")
            if tried < TRIES and stop.wait(pause):
                raise SystemExit(128 + stop.received)
    sys.exit(2)


def is_missing(error: str) -> bool:
    """True if gcloud's message reports that there is no such resource or object."""
    return "NOT_FOUND" in error or "matched no objects" in error
