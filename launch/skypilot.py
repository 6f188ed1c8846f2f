"""One run through SkyPilot (`pip install skypilot`): launch/skypilot.yaml with a command.

    python -m launch.skypilot --name=domino --nodes=2 --gpus=H100:8 \\
        -- python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=gs://bucket/run \\
        --config.data.train=gs://bucket/rows.jsonl

A managed job: SkyPilot finds the machines and replaces lost ones; on them the run starts again by itself.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from launch import commands, restarts

TASK = "launch/skypilot.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser_of("skypilot", __doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", help="of a machine, as H100:8; by default those of launch/skypilot.yaml")
    parser.add_argument("--infra", help="where, as gcp or aws/us-east-1; by default the cheapest place")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    args = commands.parse(parser, argv)
    return commands.show_or_run(args, create(args))


def create(args: argparse.Namespace) -> list[str]:
    words = ["env", *commands.assignments(args.env), *args.train]
    return [
        *("sky", "jobs", "launch", "--yes"),
        f"--name={args.name}",
        f"--num-nodes={args.nodes}",
        *([f"--gpus={args.gpus}"] if args.gpus else []),
        *([f"--infra={args.infra}"] if args.infra else []),
        f"--env=DOMINO_COMMAND={shlex.join(words)}",
        f"--env=DOMINO_MAX_RESTARTS={restarts.MAX_RESTARTS}",
        *(f"--env={name}={value}" for name, value in restarts.ENVIRONMENT.items()),
        TASK,
    ]


if __name__ == "__main__":
    sys.exit(main())
