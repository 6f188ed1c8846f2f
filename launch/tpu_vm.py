"""One run on a Cloud TPU VM or pod slice over ssh: create it, copy this commit, run on every machine.

    python -m launch.tpu_vm --name=domino --zone=us-west4-a --type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot \\
        -- python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=gs://bucket/run \\
        --config.data.train=gs://bucket/rows.jsonl

A machine that is taken away is created again with the same commit, and the same command continues from the last
checkpoint: keep the workdir on gs://. The run ends with this launcher: Ctrl-C, SIGTERM, a closed terminal and a lost
connection make it save and leave. A long run belongs in launch.queued_resources. The VM stays until it is deleted;
--delete deletes at the end, however the launcher leaves, a VM that it created.
"""

import argparse
import dataclasses
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Sequence

from launch import commands, gcloud, restarts, signals, supervise
from launch.ssh import OPTIONS

ARCHIVE = "domino_jax.tar.gz"
FOLDER = "domino_jax"
TAKEN_AWAY = ("PREEMPTED", "TERMINATED")
ON_THE_WAY = ("CREATING", "STARTING", "RESTARTING", "REIMAGING", "REPAIRING")
POLL_SECONDS = 10
COPY_TRIES = 6
LAST_COMMIT = ("git", "rev-parse", "HEAD")


@dataclasses.dataclass
class Vm:
    """The state of the VM, as this launcher has changed it."""

    commit: str = ""  # the same one after a restart, though the user may commit meanwhile
    created: bool = False  # by this launcher
    deleted: bool = False  # by this launcher, which has not created it again
    has_code: bool = False
    was_ready: bool = False


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
    commands.assignments(args.env)  # a mistake is refused before anything is created
    vm = Vm()
    try:
        with signals.passed_on():
            return keep(args, vm)
    finally:
        if args.delete and vm.created:
            delete_at_last(args)


def show(args: argparse.Namespace) -> None:
    if args.stop:
        commands.show([stop(args)])
        return
    commands.show(
        [
            LAST_COMMIT,
            "# COMMIT is what it prints",
            create(args),
            *prepare(args, "COMMIT", ARCHIVE),
            describe(args),
            "# the second word is the number of machines; for each of them:",
            str(rank(args, 0)),
            "wait",
            f"# when the machines are {' or '.join(TAKEN_AWAY)}, this, then all of the above but the first:",
            delete(args),
            *(["# at the end", delete(args)] * args.delete),
        ]
    )


def last_commit() -> str:
    commit = commands.read(LAST_COMMIT)
    if not commit:
        commands.refuse(f"git rev-parse HEAD fails in {commands.ROOT}. The machines need its last commit.")
    return commit


def keep(args: argparse.Namespace, vm: Vm) -> int:
    """Create, run, and start again by the restart rules and after machines are taken away; the run's exit code."""
    first = state(args)
    if first and first != "READY" and first not in ON_THE_WAY and not args.replace:
        commands.refuse(
            f"the VM {args.name} exists and is {first}. Choose another --name, or let --replace delete it and what is "
            "on its disks."
        )
    if first and args.delete:
        commands.say(f"the VM {args.name} exists already, and --delete deletes only a VM that this launcher creates")

    vm.commit = last_commit()

    def ranks() -> list[supervise.Rank]:
        return [rank(args, worker) for worker in range(ready(args, vm))]

    def again(code: int) -> bool:
        # A machine that goes away leaves gcloud's code for it.
        return code == supervise.LOST or restarts.starts_again(code) or state(args) in TAKEN_AWAY

    return supervise.keep_running(ranks, args.max_restarts, restarts.GRACE, again)


def ready(args: argparse.Namespace, vm: Vm) -> int:
    """Bring the VM into being, with the run's commit on it; the number of its machines.

    Raises NotReady when gcloud cannot delete, create or reach it: there may be no capacity, or no ssh server yet.
    """
    there = settled_state(args)
    vm.created = vm.created and there is not None
    if there is None and vm.was_ready and not vm.deleted:
        commands.refuse(f"the VM {args.name} was deleted; run the same command again to continue.")
    if there and there != "READY":
        if there not in TAKEN_AWAY and not args.replace and not vm.deleted:
            commands.refuse(f"the VM {args.name} is {there}: start it, or let --replace delete it.")
        vm.deleted, vm.has_code = True, False
        run_all([delete(args)])
    if there != "READY":
        vm.created = True  # it may exist also when gcloud fails or is stopped
        try:
            run_all([create(args)])
        except supervise.NotReady:
            vm.created = state(args) is not None
            raise
    vm.was_ready, vm.deleted = True, False
    if not vm.has_code:
        copy_code(args, vm)
    return int((gcloud.ask(describe(args)) or "READY\t1").split()[1])


def copy_code(args: argparse.Namespace, vm: Vm) -> None:
    """Put the run's commit on every machine. The ssh server of one that was just created may come up a little later."""
    with tempfile.TemporaryDirectory() as folder, signals.passed_on() as stop:
        for left in reversed(range(COPY_TRIES if vm.created else 1)):
            try:
                run_all(prepare(args, vm.commit, f"{folder}/{ARCHIVE}"))
                break
            except supervise.NotReady:
                if not left or stop.received:
                    raise
            commands.say(f"the machines cannot be reached yet; trying again in {POLL_SECONDS} s")
            if stop.wait(POLL_SECONDS):
                raise SystemExit(128 + stop.received)
    vm.has_code = True


def run_all(steps: Sequence[Sequence[str]]) -> None:
    if code := commands.run_all(steps):
        raise supervise.NotReady(code)


def settled_state(args: argparse.Namespace) -> str | None:
    """The VM's state, once it is not on the way to another one."""
    with signals.passed_on() as stop:
        while (there := state(args)) in ON_THE_WAY:
            commands.say(f"the VM is {there}")
            if stop.wait(POLL_SECONDS):
                raise SystemExit(128 + stop.received)
    return there


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


def archive(commit: str, path: str) -> list[str]:
    return ["git", "archive", "--format=tar.gz", f"--output={path}", commit]


def prepare(args: argparse.Namespace, commit: str, path: str) -> list[list[str]]:
    """Commands that put the commit on every machine; path: where its archive is made here."""
    copy = [*tpu_vm(args, "scp", path, f"{args.name}:{ARCHIVE}"), "--worker=all"]
    unpack = f"mkdir -p {FOLDER} && tar -xzf {ARCHIVE} -C {FOLDER}"
    return [archive(commit, path), copy, on_all(args, unpack)]


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


def delete_at_last(args: argparse.Namespace) -> None:
    """Delete the VM, which may take more than one try while it is being created; it is billed while it exists."""
    pauses = restarts.Pauses()
    with signals.passed_on() as stop:
        for _ in range(gcloud.TRIES):
            if not commands.run(delete(args)):
                return
            commands.say(f"the VM {args.name} is not deleted; it is billed while it exists")
            if stop.wait(pauses.after(0)) or state(args) is None:
                return


def delete(args: argparse.Namespace) -> list[str]:
    return [*tpu_vm(args, "delete", args.name), "--quiet"]


if __name__ == "__main__":
    sys.exit(main())
