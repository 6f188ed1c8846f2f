"""One run on a Cloud TPU VM or pod slice over ssh: create it, copy this commit, run on every machine.

    python -m launch.tpu_vm --name=domino --zone=us-west4-a --type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot \\
        -- python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=gs://bucket/run

A machine that is taken away is created again, and the same command continues from the last checkpoint: keep the workdir
on gs://. The run ends with this launcher: Ctrl-C, SIGTERM, a closed terminal and a lost connection make it save and
leave. A long run belongs in launch.queued_resources. The VM stays until it is deleted, unless --delete.
"""

import argparse
import pathlib
import shlex
import sys
from collections.abc import Sequence

from launch import commands, gcloud, restarts, signals, supervise
from launch.ssh import LOST, OPTIONS

ARCHIVE = "domino_jax.tar.gz"
FOLDER = "domino_jax"
TAKEN_AWAY = ("PREEMPTED", "TERMINATED")
ON_THE_WAY = ("CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING")
POLL_SECONDS = 10


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser_of("tpu_vm", __doc__)
    gcloud.add_flags(parser)
    parser.add_argument("--spot", action="store_true")
    parser.add_argument(
        "--autocheckpoint", action="store_true", help="SIGTERM, and minutes to save, before maintenance (gcloud alpha)"
    )
    parser.add_argument("--log_dir", type=pathlib.Path, default=pathlib.Path("logs"))
    parser.add_argument("--replace", action="store_true", help="delete a VM of this name that does not run")
    args = commands.parse(parser, argv, stoppable=True)
    if args.dry_run:
        show(args)
        return 0
    if args.stop:
        return commands.run(stop(args))
    with signals.passed_on():
        code = keep(args)
    if args.delete:
        commands.run(delete(args))
    return code


def show(args: argparse.Namespace) -> None:
    if args.stop:
        commands.show([stop(args)])
        return
    commands.show(
        [
            create(args),
            *prepare(args),
            describe(args),
            "# the second word is the number of machines; for each of them:",
            str(rank(args, 0)),
            "wait",
            f"# when the machines are {' or '.join(TAKEN_AWAY)}, this, then all of the above:",
            delete(args),
            *(["# at the end", delete(args)] * args.delete),
        ]
    )


def keep(args: argparse.Namespace) -> int:
    """Create, run, and start again by the restart rules and after machines are taken away; the run's exit code."""
    first = state(args)
    if first and first != "READY" and first not in ON_THE_WAY and not args.replace:
        commands.refuse(
            f"the VM {args.name} exists and is {first}. Choose another --name, or let --replace delete it and what is "
            "on its disks."
        )
    started = []

    def ranks() -> list[supervise.Rank]:
        count = ready(args, first=not started)
        started.append(count)
        return [rank(args, worker) for worker in range(count)]

    def again(code: int) -> bool:
        # A machine that goes away leaves whichever code gcloud has for it.
        return code == LOST or restarts.starts_again(code) or state(args) in TAKEN_AWAY

    return supervise.keep_running(ranks, args.max_restarts, restarts.GRACE, again)


def ready(args: argparse.Namespace, first: bool) -> int:
    """Bring the VM into being, with this commit on it; the number of its machines."""
    if not first and state(args) is None:
        commands.refuse(f"the VM {args.name} was deleted; run the same command again to continue.")
    with signals.passed_on() as stop:
        while (there := state(args)) in ON_THE_WAY:
            commands.say(f"the VM is {there}")
            if stop.wait(POLL_SECONDS):
                raise SystemExit(128 + stop.received)
    if there and there != "READY":
        if there not in TAKEN_AWAY and not args.replace:
            commands.refuse(f"the VM {args.name} is {there}: start it, or let --replace delete it.")
        commands.must([delete(args)])
    if there != "READY":
        commands.must([create(args)])
    if first or there != "READY":
        commands.must(prepare(args))
    return int((gcloud.ask(describe(args)) or "READY\t1").split()[1])


def state(args: argparse.Namespace) -> str | None:
    """READY, PREEMPTED, …; None when there is no such VM."""
    shown = gcloud.ask(describe(args))
    return shown.split()[0] if shown else None


def tpu_vm(args: argparse.Namespace, verb: str, *words: str, alpha: bool = False) -> list[str]:
    project = [f"--project={args.project}"] if args.project else []
    track = ["alpha"] if alpha else []
    return ["gcloud", *track, "compute", "tpus", "tpu-vm", verb, *words, f"--zone={args.zone}", *project]


def describe(args: argparse.Namespace) -> list[str]:
    return [*tpu_vm(args, "describe", args.name), "--format=value(state,networkEndpoints.len())"]


def create(args: argparse.Namespace) -> list[str]:
    kind = [f"--accelerator-type={args.type}", f"--version={args.version}"]
    spot = ["--spot"] if args.spot else []
    save = ["--autocheckpoint-enabled"] if args.autocheckpoint else []
    return [*tpu_vm(args, "create", args.name, alpha=args.autocheckpoint), *kind, *spot, *save]


def archive() -> list[str]:
    return ["git", "archive", "--format=tar.gz", f"--output={ARCHIVE}", "HEAD"]


def prepare(args: argparse.Namespace) -> list[list[str]]:
    copy = [*tpu_vm(args, "scp", ARCHIVE, f"{args.name}:{ARCHIVE}"), "--worker=all"]
    unpack = f"mkdir -p {FOLDER} && tar -xzf {ARCHIVE} -C {FOLDER}"
    return [archive(), copy, on_all(args, unpack)]


def on_all(args: argparse.Namespace, script: str) -> list[str]:
    return [*tpu_vm(args, "ssh", args.name), "--worker=all", f"--command={script}"]


def rank(args: argparse.Namespace, worker: int) -> supervise.Rank:
    words = ["env", *commands.settings(args.env), "python3", "-m", "launch.host", "--tether", "--", *on_tpu(args.train)]
    remote = f"cd {FOLDER} && exec {shlex.join(words)}"
    command = [*tpu_vm(args, "ssh", args.name), f"--worker={worker}", f"--command={remote}", "--", *OPTIONS]
    return supervise.Rank(command, {}, args.log_dir / f"rank-{worker}.log", tethered=True)


def on_tpu(train: Sequence[str]) -> list[str]:
    return ["bash", "launch/on_tpu.sh", *train]


def stop(args: argparse.Namespace) -> list[str]:
    return on_all(args, f"cd {FOLDER} && python3 -m launch.host --stop")


def delete(args: argparse.Namespace) -> list[str]:
    return [*tpu_vm(args, "delete", args.name), "--quiet"]


if __name__ == "__main__":
    sys.exit(main())
