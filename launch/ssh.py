"""One run over machines that can be reached by ssh, one process on each (it uses all devices of its machine).

    python -m launch.ssh --hosts=gpu-0,gpu-1 -- python -m domino_jax.train --config=... --workdir=...

Every machine needs this repository in --folder (below the home), its environment in --venv, and the workdir on shared
storage. The first host is the coordinator: the others must reach its --port, so keep that network closed to strangers.
All start again after exit codes 42 and 43, after signals and when a connection is lost. If a machine cannot be reached
at the first start, the launcher ends with exit code 2. Ctrl-C, SIGTERM, a closed terminal and the launcher's death end
the run on every machine: it saves and leaves.
"""

import argparse
import pathlib
import shlex
import sys
from collections.abc import Sequence

from launch import commands, restarts, supervise

# A connection that carries nothing for a minute is lost. No terminal: a run would draw colours into the log.
OPTIONS = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser_of("ssh", __doc__)
    parser.add_argument("--hosts", required=True, help="joined by commas, the coordinator first; user@host is fine")
    parser.add_argument("--folder", default="domino_jax", help="the repository on every machine")
    parser.add_argument("--venv", default=".venv", help="the environment on every machine, below --folder or absolute")
    parser.add_argument("--address", help="the coordinator's address for the others; by default as ssh finds it")
    parser.add_argument("--port", type=int, default=8476)
    commands.add_run_flags(parser)
    parser.add_argument("--log_dir", type=pathlib.Path, default=pathlib.Path("logs"))
    parser.add_argument("--grace", type=float, default=120, help="seconds for the others to leave after a failure")
    args = commands.parse(parser, argv)
    hosts = args.hosts.split(",")
    if not all(host.strip() for host in hosts):
        commands.refuse(f"--hosts={args.hosts}: a name is empty. Put one comma between two names and none at the end.")
    address = args.address or host_name(hosts[0])

    def ranks() -> list[supervise.Rank]:
        return [rank(args, host, f"{address}:{args.port}", len(hosts), process) for process, host in enumerate(hosts)]

    if args.dry_run:
        commands.show([*map(str, ranks()), "wait"])
        return 0

    def again(code: int) -> bool:
        return code == supervise.LOST or restarts.starts_again(code)

    return supervise.keep_running(ranks, args.max_restarts, args.grace, again)


def host_name(host: str) -> str:
    """The real name of a host, which may be an alias of ~/.ssh/config that no other machine knows."""
    settings = commands.read(["ssh", "-G", "--", host]) or ""
    names = [line.partition(" ")[2] for line in settings.splitlines() if line.startswith("hostname ")]
    return names[0] if names else host.rpartition("@")[2]


def rank(args: argparse.Namespace, host: str, address: str, count: int, process: int) -> supervise.Rank:
    place = (f"JAX_COORDINATOR_ADDRESS={address}", f"JAX_NUM_PROCESSES={count}", f"JAX_PROCESS_ID={process}")
    words = [*place, *commands.settings(args.env), "python", "-m", "launch.host", "--tether", "--", *args.train]
    venv = shlex.quote(args.venv) if args.venv.startswith("/") else f'"$PWD"/{shlex.quote(args.venv)}'
    remote = f'cd {shlex.quote(args.folder)} && exec env PATH={venv}/bin:"$PATH" {shlex.join(words)}'
    # -- : a host's name is never read as an option.
    command = ["ssh", "-T", "-o", "BatchMode=yes", *OPTIONS, "--", host, remote]
    return supervise.Rank(command, {}, args.log_dir / f"rank-{process}.log", tethered=True)


if __name__ == "__main__":
    sys.exit(main())
