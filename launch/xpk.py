"""One run on a GKE cluster that xpk made (`pip install xpk`), on one or more TPU slices.

    python -m launch.xpk --name=domino --cluster=tpus --type=v5litepod-256 --image=REGISTRY/domino:1 \\
        -- python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=gs://bucket/run

The image holds this repository as its working folder and jax[tpu]. xpk starts a workload again after exit code 42 and
after signals, and leaves it at any other code.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from launch import commands

# A pod may pull the image while the others wait for it.
INIT_SECONDS = 900


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("xpk", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--type", required=True, help="TPU type of a slice, as v5litepod-256")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--image", required=True)
    parser.add_argument("--zone")
    parser.add_argument("--project")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--max_restarts", type=int, default=50)
    args = commands.parse(parser, argv)
    command = create(args)
    if args.dry_run:
        commands.show([command])
        return 0
    return commands.run(command)


def create(args: argparse.Namespace) -> list[str]:
    words = ["env", f"DOMINO_INIT_SECONDS={INIT_SECONDS}", *commands.assignments(args.env), *args.train]
    return [
        *("xpk", "workload", "create"),
        f"--workload={args.name}",
        f"--cluster={args.cluster}",
        f"--tpu-type={args.type}",
        f"--num-slices={args.slices}",
        f"--docker-image={args.image}",
        f"--max-restarts={args.max_restarts}",
        "--termination-grace-period-seconds=300",
        *([f"--zone={args.zone}"] if args.zone else []),
        *([f"--project={args.project}"] if args.project else []),
        f"--command={shlex.join(words)}",
    ]


if __name__ == "__main__":
    sys.exit(main())
