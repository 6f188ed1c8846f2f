"""One long run on Cloud TPU through a queued resource: the machines run it from their start-up script, by themselves.

    python -m launch.queued_resources --name=domino --zone=us-west4-a --type=v5litepod-256 \\
        --version=v2-alpha-tpuv5-lite --spot --storage=gs://bucket/launch \\
        -- python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=gs://bucket/run \\
        --config.data.train=gs://bucket/rows.jsonl

Copies this commit to --storage, requests the machines and waits: a resource that was taken away is requested again with
the same code and continues from the last checkpoint. Ends with the run's exit code, which each machine leaves in
--storage under the attempt's name; the launcher itself can be stopped and started again at any time, and --stop ends
the run. --nodes above 1 requests several slices.
"""

import argparse
import datetime
import hashlib
import json
import pathlib
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence

from launch import commands, gcloud, machine_codes, restarts, signals, tpu_vm

STARTUP = "domino-startup.sh"
LOST = ("SUSPENDED", "FAILED")


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser_of("queued_resources", __doc__)
    gcloud.add_flags(parser)
    parser.add_argument("--storage", required=True, help="folder on gs:// for the code and the exit codes")
    parser.add_argument("--nodes", type=int, default=1, help="slices")
    parser.add_argument("--capacity", choices=("on-demand", "spot", "reserved", "best-effort"), default="on-demand")
    parser.add_argument("--spot", action="store_const", const="spot", dest="capacity", help="--capacity=spot")
    parser.add_argument("--poll", type=float, default=60, help="seconds between two looks")
    parser.add_argument("--replace", action="store_true", help="delete a resource of this name whose run is over")
    args = commands.parse(parser, argv, stoppable=True)
    if not args.storage.startswith("gs://"):
        parser.error(f"--storage={args.storage}: the machines read it, so it has to be on gs://")
    if args.dry_run:
        show(args)
        return 0
    if args.stop:
        return commands.run(stop(args))
    commands.assignments(args.env)  # a mistake is refused before anything is created
    with signals.passed_on():
        code = keep(args)
    if args.delete:
        commands.run(delete(args))
    return code


def show(args: argparse.Namespace) -> None:
    if args.stop:
        commands.show([stop(args)])
        return
    attempt, following = "ATTEMPT", "NEXT"
    commands.show(
        [
            "# a resource of this name and the attempt that it belongs to; the next ones only without a resource",
            describe(args),
            storage(args, "cat", "attempt"),
            *upload(args, attempt, tpu_vm.ARCHIVE),
            commands.here_document(["cat"], startup(args, attempt), f" > {STARTUP}"),
            create(args, STARTUP),
            f"# every {args.poll:g} s, until the machines agree on an exit code",
            storage(args, "cat", f"{attempt}/machines/*"),
            describe(args),
            f"# when the second one prints {' or '.join(LOST)}: these two, then all from the script on for NEXT",
            delete(args),
            copy(args, attempt, following),
            *(["# at the end", delete(args)] * args.delete),
        ]
    )


def keep(args: argparse.Namespace) -> int:
    """Waits for the run's exit code, and requests lost machines again. Returns the exit code."""
    attempt = attached(args) or start(args)
    problem = None
    pauses = restarts.Pauses()
    with signals.passed_on() as stopped:
        for left in range(args.max_restarts, -1, -1):
            watch = machine_codes.Watch(args.poll)
            if problem is None:
                there, code = wait(args, attempt, watch, stopped)
                if code is not None:
                    commands.run(storage(args, "cp", "-", f"{attempt}/reported"), f"{code}\n")
                    return code
                commands.run([*describe(args)[:-1], "--format=yaml(state)"])
                problem = f"the resource is {there}"
            if left == 0:
                break
            pause = pauses.after(watch.seconds())
            commands.say(f"{problem}; asking for it again in {pause:g} s, {left} times left")
            if stopped.wait(pause):
                break
            following = attempt_name(args)
            if failure := replace(args, attempt, following):
                problem = f"the request failed with exit code {failure}"
            else:
                attempt, problem = following, None
    return 128 + stopped.received if stopped.received else 1


def wait(
    args: argparse.Namespace, attempt: str, watch: machine_codes.Watch, stopped: signals.Stop
) -> tuple[str | None, int | None]:
    """The resource's state and the run's exit code, once there is one; None when its machines were lost before."""

    def left() -> str:
        return gcloud.ask(storage(args, "cat", f"{attempt}/machines/*")) or ""

    while (there := state(args)) not in LOST:
        code = watch.verdict(there, left())
        if code is not None:
            return there, code
        if stopped.wait(args.poll):
            commands.say("the run goes on by itself; the same command waits for it again, --stop ends it")
            raise SystemExit(128 + stopped.received)
    return there, machine_codes.final(left())  # it may have ended before it was lost


def attached(args: argparse.Namespace) -> str | None:
    """The attempt of ours that is under way; None when there is no resource. Any other resource is refused."""
    there = state(args)
    if there is None:
        return None
    attempt = gcloud.ask(storage(args, "cat", "attempt"))
    code = gcloud.ask(storage(args, "cat", f"{attempt}/reported")) if attempt else None
    if attempt and attempt.endswith(fingerprint(args)) and code is None:
        commands.say(f"attempt {attempt} is under way")
        return attempt
    if args.replace:
        commands.must([delete(args)])
        return None
    what = f"its run is over, with exit code {code}" if code else "it was made for another command"
    commands.refuse(
        f"the queued resource {args.name} exists, and {what}. Choose another --name, or let --replace delete it with "
        "its machines."
    )


def start(args: argparse.Namespace) -> str:
    """Copies the last commit and requests the machines; here a failure is final. Returns the attempt's name."""
    attempt = attempt_name(args)
    with tempfile.TemporaryDirectory() as folder:
        commands.must(upload(args, attempt, f"{folder}/{tpu_vm.ARCHIVE}"))
    if code := request(args, attempt):
        raise SystemExit(code)
    return attempt


def replace(args: argparse.Namespace, attempt: str, following: str) -> int:
    """Requests the machines again, with the attempt's code. Returns 0, or the exit code of the command that failed."""
    # A request that failed may have left a resource or none.
    code = commands.run(delete(args)) if state(args) is not None else 0
    return code or commands.run(copy(args, attempt, following)) or request(args, following)


def request(args: argparse.Namespace, attempt: str) -> int:
    """Requests the attempt's machines, whose code is stored. Returns 0, or the exit code of the command that failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / STARTUP
        path.write_text(startup(args, attempt), encoding="utf-8")
        return commands.run(storage(args, "cp", "-", "attempt"), attempt) or commands.run(create(args, str(path)))


def attempt_name(args: argparse.Namespace) -> str:
    """A name that no other attempt has, also of the same second; it ends with the run's fingerprint."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}-{fingerprint(args)}"


def fingerprint(args: argparse.Namespace) -> str:
    """Distinguishes one run from another of the same name."""
    run = [args.train, args.env, args.type, args.version, args.nodes]
    return hashlib.sha256(json.dumps(run).encode()).hexdigest()[:8]


def startup(args: argparse.Namespace, attempt: str) -> str:
    """The start-up script: fetch the code, run, leave the exit code. It runs as root, with hardly an environment."""
    host = ["python3", "-m", "launch.host", f"--max_restarts={restarts.MAX_RESTARTS}", "--"]
    words = ["env", *commands.settings(args.env), *host, *tpu_vm.on_tpu(args.train)]
    source, machines = (shlex.quote(place(args, f"{attempt}/{name}")) for name in (tpu_vm.ARCHIVE, "machines"))
    return f"""#!/usr/bin/env bash
set -uo pipefail
export HOME=/root
again() {{
  for pause in 5 20 60 120 end; do
    if "$@"; then return 0; fi
    if [ "$pause" != end ]; then sleep "$pause"; fi
  done
  return 1
}}
tell() {{ echo "$(date +%s) $1 $(hostname)" | gcloud storage cp - {machines}/"$(hostname)"; }}
fetch() {{ gcloud storage cp {source} code.tar.gz && tar -xzf code.tar.gz; }}
mkdir -p /root/domino_jax
cd /root/domino_jax || exit
again tell running
code=0
if again fetch; then
  {shlex.join(words)} || code=$?
else
  code=2
fi
again tell "$code"
"""


def place(args: argparse.Namespace, name: str) -> str:
    return f"{args.storage.rstrip('/')}/{args.name}/{name}"


def storage(args: argparse.Namespace, verb: str, *words: str) -> list[str]:
    return ["gcloud", "storage", verb, *words[:-1], place(args, words[-1])]


def upload(args: argparse.Namespace, attempt: str, path: str) -> list[list[str]]:
    """Commands that store the last commit with the attempt; path: where its archive is made here."""
    return [tpu_vm.archive("HEAD", path), storage(args, "cp", path, f"{attempt}/{tpu_vm.ARCHIVE}")]


def copy(args: argparse.Namespace, attempt: str, following: str) -> list[str]:
    """Give the next attempt the same code: the user may have committed since, and this launcher been restarted."""
    source = place(args, f"{attempt}/{tpu_vm.ARCHIVE}")
    return storage(args, "cp", source, f"{following}/{tpu_vm.ARCHIVE}")


def queued(args: argparse.Namespace, verb: str, *words: str) -> list[str]:
    # best-effort capacity is known to the alpha commands alone.
    alpha = ["alpha"] if args.capacity == "best-effort" else []
    project = [f"--project={args.project}"] if args.project else []
    where = [args.name, f"--zone={args.zone}", *project]
    return ["gcloud", *alpha, "compute", "tpus", "queued-resources", verb, *where, *words]


def create(args: argparse.Namespace, startup_file: str) -> list[str]:
    several = [f"--node-count={args.nodes}", f"--node-prefix={args.name}"]
    return [
        *queued(args, "create"),
        *(several if args.nodes > 1 else [f"--node-id={args.name}"]),
        f"--accelerator-type={args.type}",
        f"--runtime-version={args.version}",
        *([] if args.capacity == "on-demand" else [f"--{args.capacity}"]),
        f"--metadata-from-file=startup-script={startup_file}",
    ]


def describe(args: argparse.Namespace) -> list[str]:
    return queued(args, "describe", "--format=value(state.state)")


def state(args: argparse.Namespace) -> str | None:
    """ACTIVE, SUSPENDED, …; None when there is no such resource."""
    return gcloud.ask(describe(args))


def stop(args: argparse.Namespace) -> list[str]:
    script = "cd /root/domino_jax && HOME=/root python3 -m launch.host --stop"
    return queued(args, "ssh", "--node=all", "--worker=all", f"--command=sudo sh -c {shlex.quote(script)}")


def delete(args: argparse.Namespace) -> list[str]:
    return queued(args, "delete", "--force", "--quiet")


if __name__ == "__main__":
    sys.exit(main())
