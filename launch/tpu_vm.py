"""One run on a Cloud TPU VM or pod slice over ssh: create it, copy this commit, run on every machine.

    python -m launch.tpu_vm --name=domino --zone=us-west4-a --type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot \\
        -- python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=gs://bucket/run

A machine that is gone is created again, and the same command continues from the last checkpoint: keep the workdir on
gs://. The run ends with this terminal's connection; a long one belongs in launch.queued_resources. The VM stays until
it is deleted, unless --delete.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from launch import commands

ARCHIVE = "domino_jax.tar.gz"
FOLDER = "domino_jax"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("tpu_vm", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--zone", required=True)
    parser.add_argument("--type", required=True, help="accelerator type, as v5litepod-16")
    parser.add_argument("--version", required=True, help="TPU software version, as v2-alpha-tpuv5-lite")
    parser.add_argument("--project")
    parser.add_argument("--spot", action="store_true")
    parser.add_argument(
        "--autocheckpoint", action="store_true", help="SIGTERM, and minutes to save, before maintenance"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--max_restarts", type=int, default=50, help="machines to create after a lost one")
    parser.add_argument("--delete", action="store_true", help="delete the VM at the end")
    args = commands.parse(parser, argv)
    prepare = [create(args), archive(), copy(args), unpack(args)]
    if args.dry_run:
        again = f"# when the machine is lost, at most {args.max_restarts} times: this, then all of the above"
        commands.show([*prepare, run(args), again, delete(args), *(["# at the end", delete(args)] * args.delete)])
        return 0
    code = keep(args, prepare)
    if args.delete:
        commands.run(delete(args))
    return code


def keep(args: argparse.Namespace, prepare: Sequence[Sequence[str]]) -> int:
    """Create, run, and begin again as long as machines are lost; the exit code of the run."""
    for attempt in range(args.max_restarts + 1):
        there = state(args)
        if there != "READY":
            if there:
                commands.run(delete(args))
            commands.must(prepare)
        elif attempt == 0:
            commands.must(prepare[1:])
        code = commands.run(run(args))
        # on_tpu.sh has started again by itself what can be: a failure on a machine that is still there is final.
        if code == 0 or (there := state(args)) == "READY":
            return code
        print(f"launch: the machine is {there or 'gone'}", file=sys.stderr)
        time.sleep(10)
    return code


def gcloud(args: argparse.Namespace, verb: str, *words: str) -> list[str]:
    project = [f"--project={args.project}"] if args.project else []
    return ["gcloud", "compute", "tpus", "tpu-vm", verb, *words, f"--zone={args.zone}", *project]


def state(args: argparse.Namespace) -> str | None:
    """READY, PREEMPTED, …; None when there is no such VM."""
    return commands.read([*gcloud(args, "describe", args.name), "--format=value(state)"])


def create(args: argparse.Namespace) -> list[str]:
    kind = [f"--accelerator-type={args.type}", f"--version={args.version}"]
    spot = ["--spot"] if args.spot else []
    save = ["--autocheckpoint-enabled"] if args.autocheckpoint else []
    return [*gcloud(args, "create", args.name), *kind, *spot, *save]


def archive() -> list[str]:
    return ["git", "archive", "--format=tar.gz", f"--output={ARCHIVE}", "HEAD"]


def copy(args: argparse.Namespace) -> list[str]:
    return [*gcloud(args, "scp", ARCHIVE, f"{args.name}:{ARCHIVE}"), "--worker=all"]


def on_all(args: argparse.Namespace, script: str) -> list[str]:
    return [*gcloud(args, "ssh", args.name), "--worker=all", f"--command={script}"]


def unpack(args: argparse.Namespace) -> list[str]:
    return on_all(args, f"mkdir -p {FOLDER} && tar -xzf {ARCHIVE} -C {FOLDER}")


def run(args: argparse.Namespace) -> list[str]:
    words = ["env", *commands.assignments(args.env), "bash", f"{FOLDER}/launch/on_tpu.sh", *args.train]
    return on_all(args, shlex.join(words))


def delete(args: argparse.Namespace) -> list[str]:
    return [*gcloud(args, "delete", args.name), "--quiet"]


if __name__ == "__main__":
    sys.exit(main())
