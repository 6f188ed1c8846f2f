"""One long run on Cloud TPU through a queued resource: the machines run it from their start-up script, by themselves.

    python -m launch.queued_resources --name=domino --zone=us-west4-a --type=v5litepod-256 \\
        --version=v2-alpha-tpuv5-lite --spot --storage=gs://bucket/launch \\
        -- python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=gs://bucket/run

Copies this commit to --storage, asks for the machines and waits: a resource that was taken away is asked for again and
continues from the last checkpoint. Ends with the run's exit code, which the machines leave in --storage; the launcher
itself can be stopped and started again at any time. --nodes above 1 asks for several slices.
"""

import argparse
import pathlib
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence

from launch import commands, tpu_vm

STARTUP = "domino-startup.sh"
LOST = ("SUSPENDED", "FAILED")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "queued_resources", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--name", required=True)
    parser.add_argument("--zone", required=True)
    parser.add_argument("--type", required=True, help="accelerator type, as v5litepod-256")
    parser.add_argument("--version", required=True, help="TPU software version, as v2-alpha-tpuv5-lite")
    parser.add_argument("--storage", required=True, help="folder on gs:// for the code and the exit code")
    parser.add_argument("--project")
    parser.add_argument("--nodes", type=int, default=1, help="slices")
    parser.add_argument("--capacity", choices=("on-demand", "spot", "reserved", "best-effort"), default="on-demand")
    parser.add_argument("--spot", action="store_const", const="spot", dest="capacity", help="--capacity=spot")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--poll", type=float, default=60, help="seconds between two looks")
    parser.add_argument("--delete", action="store_true", help="delete the machines at the end")
    args = commands.parse(parser, argv)
    if not args.storage.startswith("gs://"):
        parser.error(f"--storage={args.storage}: the machines read it, so it has to lie on gs://")
    if args.dry_run:
        show(args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / STARTUP
        path.write_text(startup(args), encoding="utf-8")
        code = keep(args, str(path))
    if args.delete:
        commands.run(delete(args))
    return code


def show(args: argparse.Namespace) -> None:
    commands.show(
        [
            f"{shlex.join(forget(args))} || true",
            *upload(args),
            commands.here_document(["cat"], startup(args), f" > {STARTUP}"),
            create(args, STARTUP),
            f"# every {args.poll:g} s, until the second one finds a number",
            describe(args),
            exit_code(args),
            f"# when the first one says {' or '.join(LOST)}: this, and create again",
            delete(args),
            *(["# at the end", delete(args)] * args.delete),
        ]
    )


def keep(args: argparse.Namespace, startup_file: str) -> int:
    """Wait for the run's exit code and ask for lost machines again."""
    there = commands.read(describe(args))
    if there is None:
        commands.run(forget(args))  # of an earlier run of this name; mostly there is none
        commands.must([*upload(args), create(args, startup_file)])
    while True:
        code = commands.read(exit_code(args))
        if code is not None and code.isdigit():
            return int(code)
        there = commands.read(describe(args))
        if there in LOST:
            print(f"launch: the resource is {there}", file=sys.stderr)
            commands.must([delete(args), create(args, startup_file)])
        time.sleep(args.poll)


def startup(args: argparse.Namespace) -> str:
    """The start-up script: fetch the code, run, leave the exit code. It runs as root, with hardly an environment."""
    words = ["env", *commands.assignments(args.env), "bash", "launch/on_tpu.sh", *args.train]
    source, result = (shlex.quote(place(args, name)) for name in (tpu_vm.ARCHIVE, "exit-code"))
    return f"""#!/usr/bin/env bash
set -euo pipefail
export HOME=/root
mkdir -p /root/domino_jax
cd /root/domino_jax
gcloud storage cp {source} code.tar.gz
tar -xzf code.tar.gz
code=0
{shlex.join(words)} || code=$?
echo "$code" | gcloud storage cp - {result}
"""


def place(args: argparse.Namespace, name: str) -> str:
    return f"{args.storage.rstrip('/')}/{args.name}/{name}"


def upload(args: argparse.Namespace) -> list[list[str]]:
    return [tpu_vm.archive(), ["gcloud", "storage", "cp", tpu_vm.ARCHIVE, place(args, tpu_vm.ARCHIVE)]]


def exit_code(args: argparse.Namespace) -> list[str]:
    return ["gcloud", "storage", "cat", place(args, "exit-code")]


def forget(args: argparse.Namespace) -> list[str]:
    return ["gcloud", "storage", "rm", place(args, "exit-code")]


def gcloud(args: argparse.Namespace, verb: str) -> list[str]:
    # best-effort capacity is known to the alpha commands alone.
    alpha = ["alpha"] if args.capacity == "best-effort" else []
    project = [f"--project={args.project}"] if args.project else []
    where = [args.name, f"--zone={args.zone}", *project]
    return ["gcloud", *alpha, "compute", "tpus", "queued-resources", verb, *where]


def create(args: argparse.Namespace, startup_file: str) -> list[str]:
    several = [f"--node-count={args.nodes}", f"--node-prefix={args.name}"]
    return [
        *gcloud(args, "create"),
        *(several if args.nodes > 1 else [f"--node-id={args.name}"]),
        f"--accelerator-type={args.type}",
        f"--runtime-version={args.version}",
        *([] if args.capacity == "on-demand" else [f"--{args.capacity}"]),
        f"--metadata-from-file=startup-script={startup_file}",
    ]


def describe(args: argparse.Namespace) -> list[str]:
    return [*gcloud(args, "describe"), "--format=value(state.state)"]


def delete(args: argparse.Namespace) -> list[str]:
    return [*gcloud(args, "delete"), "--force", "--quiet"]


if __name__ == "__main__":
    sys.exit(main())
