"""One run on a GKE cluster that xpk made (`pip install xpk`), on one or more TPU slices.

    python -m launch.xpk --name=domino --cluster=tpus --type=v5litepod-256 --image=REGISTRY/domino:1 \\
        -- python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=gs://bucket/run \\
        --config.data.train=gs://bucket/rows.jsonl

The image holds this repository as its working folder and jax[tpu]. A workload starts again after exit codes 42 and 43
and, as xpk has it, after 127 to 255 (signals); any other code is final.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from launch import commands, restarts


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser_of("xpk", __doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--type", required=True, help="TPU type of a slice, as v5litepod-256")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--image", required=True)
    parser.add_argument("--zone")
    parser.add_argument("--project")
    commands.add_run_flags(parser)
    args = commands.parse(parser, argv)
    return commands.show_or_run(args, create(args))


def create(args: argparse.Namespace) -> list[str]:
    # exec: xpk's script sends SIGTERM to the shell that runs the command.
    words = ["exec", "env", *commands.settings(args.env), *args.train]
    return [
        *("xpk", "workload", "create"),
        f"--workload={args.name}",
        f"--cluster={args.cluster}",
        f"--tpu-type={args.type}",
        f"--num-slices={args.slices}",
        f"--docker-image={args.image}",
        f"--max-restarts={args.max_restarts}",
        f"--termination-grace-period-seconds={restarts.GRACE}",
        # xpk knows 42 and everything from 127 on by itself.
        f"--restart-on-exit-codes={restarts.HUNG}",
        *([f"--zone={args.zone}"] if args.zone else []),
        *([f"--project={args.project}"] if args.project else []),
        f"--command={commands.kubernetes(shlex.join(words))}",
    ]


if __name__ == "__main__":
    sys.exit(main())
