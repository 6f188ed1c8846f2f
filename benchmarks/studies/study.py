"""The stages of a comparison in one folder: answers, trainings, decodings and other commands, each run once.

A stage is a real command in a separate process with a log, <workdir>/<name>.log, and a record, <workdir>/<name>.json.
A finished stage is not run again, an interrupted one continues as its command does, and one that was started with
other flags is refused. So a study may be stopped at any moment and started again.
"""

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from domino_jax.recipe.checks import load_recipe, portable, value_at
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import write_whole
from domino_jax.runtime.preemption import PREEMPTED

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "tiny.py"
PROMPTS = ROOT / "assets" / "tiny_qwen3" / "prompts_train.jsonl"
EVALUATIONS = 4  # of each training, spread evenly, the last at its end
LOGGED = 100  # steps of each training, about
TIMED_PROMPTS = 24  # answered by each drafter for its tokens per second
MINUTE = 60.0


class OutOfTime(DominoError):
    """The time of --minutes is over, or the study was asked to stop; everything so far is saved."""

    exit_code = PREEMPTED


@dataclasses.dataclass(frozen=True)
class Variant:
    """One of the trainings compared: its title in the tables, what it changes in the recipe, its colour."""

    title: str
    changes: Mapping[str, Any]
    colour: str = "#000000"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command of a study.

    name: of its record and log.  module: for `python -m`.  flags: without `--`, in any order.
    folder: the flag that names its folder or file under the workdir, and that name.
    brief: with other flags it is run again instead of refused.
    """

    name: str
    module: str
    flags: Mapping[str, Any]
    folder: tuple[str, str]
    brief: bool = False


class Study:
    """Runs stages in `workdir` until the time is over.

    Args:
        overrides: further --config.KEY=VALUE flags, which go to every command that has a recipe.
        minutes: the time limit; 0 means none. At the limit the running stage is asked to save and stop. No further
            stage begins.
    """

    def __init__(self, workdir: str | os.PathLike, overrides: Sequence[str] = (), minutes: float = 0.0):
        self.workdir = pathlib.Path(workdir).expanduser().resolve()
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.overrides = dict(text.removeprefix("--").split("=", 1) for text in overrides)
        self.deadline = time.monotonic() + MINUTE * minutes if minutes else None
        self.prefix = ""  # of its stages' names

    def of_target(self, name: str, folder: pathlib.Path) -> "Study":
        """The same study, in the same workdir, on another target: its stages and its rows have separate names."""
        other = copy.copy(self)
        other.prefix, other.overrides = f"{name}_", {**self.overrides, "config.target.path": folder}
        return other

    # ------------------------------------------------------------------------------------------------ stages

    def answers(self) -> pathlib.Path:
        """The target's answers to the recipe's training prompts: rows for all trainings."""
        prompts = self.overrides.get("config.data.train", str(PROMPTS))
        flags = {"config": RECIPE, "prompts": prompts, **self.overrides}
        place = ("output", f"{self.prefix}rows.jsonl")
        return self.run(Stage(f"{self.prefix}regenerate", "domino_jax.regenerate", flags, place))

    def train(self, name: str, changes: Mapping[str, Any], seed: int, steps: int) -> pathlib.Path:
        """The workdir of one training on the answers, evaluated EVALUATIONS times if `changes` do not say otherwise."""
        every = -(-steps // EVALUATIONS)
        values = {
            "seed": seed,
            "train.steps": steps,
            "train.log_every": max(1, steps // LOGGED),
            "checkpoint.every": every,
            "eval.every": every,
            "eval.num_prompts": 64,
            "eval.batch_size": 16,  # τ does not depend on it
            "eval.final": False,
            "preflight.rows": 0,  # the rows are the target's own
            **changes,
        }
        name = f"{self.prefix}{name}_seed{seed}_steps{steps}"
        return self.run(Stage(name, "domino_jax.train", self._on_answers(values), ("workdir", name)))

    def step_cost(self, name: str, changes: Mapping[str, Any], steps: int) -> dict[str, Any]:
        """dry_run.json of a training: FLOPs and memory of a step, counted from the program without running it.

        With the steps of the training the program is the same, and the training has left it in the cache.
        """
        values = {"train.steps": steps, "eval.every": 0, "eval.final": False, **changes}
        flags = {**self._on_answers(values), "dry_run": ""}
        folder = self.run(Stage(f"{name}_cost", "domino_jax.train", flags, ("workdir", f"{name}_cost")))
        return json.loads((folder / "dry_run.json").read_text())

    def decode(self, name: str, drafter: pathlib.Path, values: Mapping[str, Any]) -> dict[str, Any]:
        """The report of a decoding of the recipe's held-out prompts with the export of a training."""
        changes = {"drafter.path": drafter, **values}
        flags = {"config": RECIPE, **self.overrides, **{f"config.{key}": value for key, value in changes.items()}}
        folder = self.run(Stage(name, "domino_jax.decode", flags, ("output", name)))
        return json.loads((folder / "report.json").read_text())

    def of_recipe(self, key: str) -> Any:
        """A value of the recipe; where an override gives it, its text."""
        given = f"config.{key}"
        return self.overrides[given] if given in self.overrides else value_at(load_recipe(str(RECIPE)), key)

    @property
    def held_out(self) -> str:
        """The file of the held-out prompts."""
        return self.of_recipe("eval.prompts")

    def timings(
        self, name: str, runs: Mapping[str, pathlib.Path], drafts: int, nodes: int, seed: int
    ) -> dict[str, Any]:
        """What drafter_timings.py measures of trainings, by name; drafts: of a chain, nodes: of a tree.

        Other runs or settings under the same name are measured again.
        """
        flags = {
            "runs": ",".join(f"{name}={run}" for name, run in runs.items()),
            "prompts": self.held_out,
            "count": TIMED_PROMPTS,
            "drafts": drafts,
            "nodes": nodes,
            "seed": seed,
        }
        place = ("output", f"{name}.figures.json")
        stage = Stage(name, "benchmarks.studies.drafter_timings", flags, place, brief=True)
        return json.loads(self.run(stage).read_text())

    def _on_answers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Flags of a training: what the command line gives goes over what the study gives."""
        flags = {"config": RECIPE, **{f"config.{key}": value for key, value in values.items()}, **self.overrides}
        rows = self.workdir / f"{self.prefix}rows.jsonl"
        return flags | {"config.data.train": rows, "config.data.regenerate": False}

    # ------------------------------------------------------------------------------------------------ running

    def run(self, stage: Stage) -> pathlib.Path:
        """The stage's folder or file, after its command has ended well, now or earlier.

        Raises:
            DominoError: it was started with other flags, or its command failed.
            OutOfTime: the time is over.
        """
        folder, record = self.workdir / stage.folder[1], self.workdir / f"{stage.name}.json"
        # Without the paths of workdir and checkout, which may be moved.
        flags = {key: portable(str(value).replace(str(self.workdir), "WORKDIR")) for key, value in stage.flags.items()}
        done = {"module": stage.module, "flags": flags, "seconds": 0.0, "finished": False}
        if record.exists():
            stored = json.loads(record.read_text())
            if stored["flags"] == flags or not stage.brief:
                refuse_other_flags(record, stored["flags"], flags)
                done = stored
        if done["finished"]:
            print(f"{stage.name}: already finished", flush=True)
            return folder
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise OutOfTime(f"the time is over before {stage.name}; start again to continue.")
        write_whole(record, json.dumps(done, indent=1) + "\n")
        named = {**stage.flags, stage.folder[0]: folder}
        arguments = [f"--{key}" if value == "" else f"--{key}={value}" for key, value in named.items()]
        begin = time.monotonic()
        try:
            self.execute([stage.module, *arguments], stage.name)
            done["finished"] = True
        finally:
            done["seconds"] = round(done["seconds"] + time.monotonic() - begin, 1)
            write_whole(record, json.dumps(done, indent=1) + "\n")
        return folder

    def forget(self, name: str) -> None:
        """Lets a stage be run again."""
        (self.workdir / f"{name}.json").unlink(missing_ok=True)

    def execute(self, command: Sequence[str], name: str) -> None:
        """Runs a module in a separate process; its output goes to <workdir>/<name>.log."""
        cache = self.workdir / ".xla_cache"  # one for all: the runs share most of their programs
        cache.mkdir(mode=0o700, exist_ok=True)
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)}
        log = self.workdir / f"{name}.log"
        print(f"{name}: running, see {log}", flush=True)
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        with passing_on(signal.SIGTERM, process):
            code = self._wait(process)
        if code in (PREEMPTED, -signal.SIGTERM):  # the latter: it had nothing to lose yet
            raise OutOfTime(f"{name} was stopped with everything saved; start again to continue.")
        if code:
            last = log.read_text(encoding="utf-8").strip().splitlines()[-3:]
            raise DominoError(f"{name} left with exit code {code}; {log} ends:\n" + "\n".join(last))

    def _wait(self, process: subprocess.Popen) -> int:
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            return process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()  # the commands save and leave
            return process.wait()


@contextlib.contextmanager
def passing_on(number: signal.Signals, process: subprocess.Popen) -> Iterator[None]:
    """A signal to this process goes to `process`, after whose end the study stops."""
    before = signal.signal(number, lambda *_: process.send_signal(number))
    try:
        yield
    finally:
        signal.signal(number, before)


def refuse_other_flags(record: pathlib.Path, stored: Mapping[str, str], flags: Mapping[str, str]) -> None:
    different = sorted(key for key in {*stored, *flags} if stored.get(key) != flags.get(key))
    if different:
        key = different[0]
        was, now = (values.get(key, "absent") for values in (stored, flags))
        raise DominoError(
            f"{record} was made with other flags: {key} was {was} and is {now}.\n"
            "Choose another --workdir, or give the same flags."
        )


# ---------------------------------------------------------------------------------------------- command line


def parser_of(description: str, steps: int, output: pathlib.Path = ROOT / "docs") -> argparse.ArgumentParser:
    """The flags that all studies have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workdir", required=True, help="folder of the rows and of all runs")
    parser.add_argument("--steps", type=at_least(1), default=steps, help="steps of each training")
    parser.add_argument("--seeds", type=seeds_of, default=[0], help="joined by commas; a run of each kind for each")
    parser.add_argument("--only", default="", help="names joined by commas: run these alone and write no table")
    parser.add_argument("--minutes", type=time_of, default=0.0, help="save and stop after this time; 0: no limit")
    parser.add_argument("--output", default=str(output), help="folder of the page and its pictures")
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, names: Callable[[argparse.Namespace], Sequence]
) -> tuple[argparse.Namespace, list[str]]:
    """(the flags, the --config.KEY=VALUE overrides); anything else is refused.

    names: flags → what --only may name, which becomes a list.
    """
    options, overrides = parser.parse_known_args(arguments)
    wrong = [text for text in overrides if not (text.startswith("--config.") and "=" in text)]
    if wrong:
        parser.error(f"{wrong[0]} is no flag; besides those above only --config.KEY=VALUE is passed on")
    options.only = [name for name in options.only.split(",") if name]
    unknown = [name for name in options.only if name not in names(options)]
    if unknown:
        parser.error(f"--only={unknown[0]}: choose among {', '.join(names(options))}")
    return options, overrides


def at_least(least: int) -> Callable[[str], int]:
    """The type of a flag that is a whole number, `least` or more."""

    def whole(text: str) -> int:
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of {least} or more")
        return int(text)

    return whole


def seeds_of(text: str) -> list[int]:
    seeds = [at_least(0)(seed) for seed in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice")
    return seeds


def time_of(text: str) -> float:
    """The type of a flag that is a time; 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a time of 0 or more")
    return value


def say_command(module: str, options: argparse.Namespace, names: Sequence[str], overrides: Sequence[str]) -> str:
    """The command that makes the same figures; names: of the flags to print."""
    values = {**vars(options), "seeds": ",".join(map(str, options.seeds))}
    return " ".join(
        [f"python -m {module} --workdir=WORKDIR", *(f"--{name}={values[name]}" for name in names), *overrides]
    )


def run_main(main: Callable[[], None]) -> None:
    """Runs `main`; a user's mistake is one message with its exit code."""
    try:
        main()
    except DominoError as error:
        print(f"error: {error}" if not isinstance(error, OutOfTime) else str(error), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
