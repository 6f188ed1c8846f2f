"""One run over machines that can be reached by ssh, one process on each (it uses all devices of its machine).

    python -m launch.ssh --hosts=gpu-0,gpu-1 -- python -m domino_jax.train --config=... --workdir=...

Every machine needs this repository in --folder (below the home), its environment, and the workdir on shared storage.
The first host is the coordinator: the others must reach its --port, so keep that network closed to strangers. All start
again after exit code 42 and when a connection is lost. Ending the launcher ends the run at its last checkpoint.
"""

import argparse
import pathlib
import shlex
import sys
from collections.abc import Sequence

from launch import commands, supervise

# ssh's own code for a lost connection, and for a command that a signal ended.
LOST = 255


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("ssh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", required=True, help="joined by commas, the coordinator first; user@host is fine")
    parser.add_argument("--folder", default="domino_jax", help="the repository on every machine")
    parser.add_argument("--address", help="the coordinator's address for the others, by default the first host's name")
    parser.add_argument("--port", type=int, default=8476)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--log_dir", type=pathlib.Path, default=pathlib.Path("logs"))
    parser.add_argument("--max_restarts", type=int, default=10)
    parser.add_argument("--grace", type=float, default=120, help="seconds for the others to leave after a failure")
    args = commands.parse(parser, argv)
    hosts = args.hosts.split(",")
    address = args.address or hosts[0].rpartition("@")[2]

    def ranks() -> list[supervise.Rank]:
        return [rank(args, host, f"{address}:{args.port}", len(hosts), process) for process, host in enumerate(hosts)]

    if args.dry_run:
        commands.show([*map(str, ranks()), "wait"])
        return 0
    return supervise.keep_running(ranks, args.max_restarts, args.grace, again=(supervise.SAVED, LOST))


def rank(args: argparse.Namespace, host: str, address: str, count: int, process: int) -> supervise.Rank:
    place = (f"JAX_COORDINATOR_ADDRESS={address}", f"JAX_NUM_PROCESSES={count}", f"JAX_PROCESS_ID={process}")
    words = ["env", *place, *commands.assignments(args.env), *args.train]
    remote = f"cd {shlex.quote(args.folder)} && exec {shlex.join(words)}"
    # -tt: with a terminal the remote process ends when the connection does, and does not train on unseen.
    # -- : a host's name is never read as an option.
    return supervise.Rank(
        ["ssh", "-tt", "-o", "BatchMode=yes", "--", host, remote], {}, args.log_dir / f"rank-{process}.log"
    )


if __name__ == "__main__":
    sys.exit(main())
