"""One run as several processes on this machine's CPU, to try out what a cluster will do.

    python -m launch.local --processes=2 --devices=2 -- python -m domino_jax.train --config=configs/tiny.py --workdir=w

Each process sees its own --devices CPU devices; they find each other on the loopback. rank-N.log in --log_dir holds the
output of each; that of rank 0 is shown too. Ctrl-C, SIGTERM and a closed terminal (SIGHUP) are passed on.
"""

import argparse
import pathlib
import socket
import sys
from collections.abc import Sequence

from launch import commands, restarts, supervise

LOOPBACK = "127.0.0.1"


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser_of("local", __doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of each process")
    parser.add_argument("--port", type=int, default=0, help="of the coordinator; 0 (default): a free one")
    parser.add_argument("--log_dir", type=pathlib.Path, default=pathlib.Path("logs"))
    parser.add_argument("--max_restarts", type=int, default=restarts.MAX_RESTARTS)
    parser.add_argument("--grace", type=float, default=30, help="seconds to leave in after a failure or a signal")
    args = commands.parse(parser, argv)
    if args.processes < 1 or args.devices < 1:
        parser.error("--processes and --devices are 1 or more")

    def ranks() -> list[supervise.Rank]:
        # A new port each time: the old one may still be waiting to close.
        port = args.port or free_port()
        return [rank(args, port, process) for process in range(args.processes)]

    if args.dry_run:
        commands.show([*map(str, ranks()), "wait"])
        return 0
    return supervise.keep_running(ranks, args.max_restarts, args.grace)


def rank(args: argparse.Namespace, port: int, process: int) -> supervise.Rank:
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(args.devices),
        "JAX_COORDINATOR_ADDRESS": f"{LOOPBACK}:{port}",
        "JAX_NUM_PROCESSES": str(args.processes),
        "JAX_PROCESS_ID": str(process),
    }
    return supervise.Rank(args.train, environment, args.log_dir / f"rank-{process}.log")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
