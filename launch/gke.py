"""One run on any Kubernetes cluster with TPU nodes and JobSet, without xpk: fills in launch/jobset.yaml.

    python -m launch.gke --name=domino --accelerator=tpu-v5-lite-podslice --topology=16x16 --hosts=64 \\
        --image=REGISTRY/domino:1 -- python -m domino_jax.train --config=configs/qwen3_8b.py \\
        --workdir=gs://bucket/run --config.data.train=gs://bucket/rows.jsonl

The image holds this repository as its working folder and jax[tpu]; the service account may read and write the workdir.
All pods start again after exit codes 42 and 43, after signals and after a lost node; any other failure is final.
"""

import argparse
import json
import string
import sys
from collections.abc import Sequence

from launch import commands, restarts

TEMPLATE = commands.ROOT / "launch" / "jobset.yaml"
APPLY = ("kubectl", "apply", "-f", "-")


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser_of("gke", __doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--accelerator", required=True, help="the nodes' label, as tpu-v5-lite-podslice")
    parser.add_argument("--topology", required=True, help="of a slice, as 16x16")
    parser.add_argument("--hosts", type=int, required=True, help="machines of a slice")
    parser.add_argument("--chips", type=int, default=4, help="of a machine")
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--image", required=True)
    parser.add_argument("--service_account", default="default")
    commands.add_run_flags(parser)
    args = commands.parse(parser, argv)
    text = manifest(args)
    if args.dry_run:
        commands.show([commands.here_document(APPLY, text)])
        return 0
    return commands.run(APPLY, text)


def manifest(args: argparse.Namespace) -> str:
    """The JobSet; every value is filled in as JSON, which YAML reads as it is meant, with any characters."""
    values = {
        "name": args.name,
        "accelerator": args.accelerator,
        "topology": args.topology,
        "hosts": args.hosts,
        "chips": args.chips,
        "slices": args.slices,
        "processes": str(args.hosts * args.slices),
        "image": args.image,
        "service_account": args.service_account,
        "max_restarts": args.max_restarts,
        "restart_codes": list(restarts.AGAIN),
        "grace": restarts.GRACE,
        "init_seconds": str(restarts.INIT_SECONDS),
        "command": [commands.kubernetes(word) for word in ["env", *commands.assignments(args.env), *args.train]],
    }
    filled = {name: json.dumps(value) for name, value in values.items()}
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(filled)


if __name__ == "__main__":
    sys.exit(main())
