"""The stages of a comparison in one folder: answers, trainings, decodings and other commands, each run once.

A stage is a real command in a separate process with a log, <workdir>/<name>.log, and a record, <workdir>/<name>.json.
A finished stage is not run again, an interrupted one continues as its command does, and one that was started with
other flags is refused. So a study may be stopped at any moment and started again.
"""

import argparse
import contextlib
import dataclasses
import json
import operator
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.tables import ROOT, conditions, publish
from domino_jax.decoding.settings import BASELINE, DRAFT, TREE
from domino_jax.recipe.loading import load_recipe
from domino_jax.recipe.rules import unread
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import write_whole
from domino_jax.runtime.preemption import PREEMPTED

RECIPE = ROOT / "configs" / "tiny.py"
PROMPTS = ROOT / "assets" / "tiny_qwen3" / "prompts_train.jsonl"
GOLDEN = ROOT / "tests" / "golden" / "tied_shift"  # the random target of --small
EVALUATIONS = 4  # of each training, spread evenly, the last at its end
LOGGED = 100  # steps of each training, about
TIMED_PROMPTS = 24  # answered by each drafter for its tokens per second
MINUTE = 60.0


class OutOfTime(DominoError):
    """The time of --minutes is over, or the study was asked to stop; everything so far is saved."""

    exit_code = PREEMPTED


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

    # ------------------------------------------------------------------------------------------------ stages

    def answers(self) -> pathlib.Path:
        """The target's answers to the recipe's training prompts: rows for all trainings."""
        prompts = self.overrides.get("config.data.train", str(PROMPTS))
        flags = {"config": RECIPE, "prompts": prompts, **self.overrides}
        return self.run(Stage("regenerate", "domino_jax.regenerate", flags, ("output", "rows.jsonl")))

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
            "eval.final": False,
            **changes,
        }
        name = f"{name}_seed{seed}_steps{steps}"
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
        flag = f"config.{key}"
        return self.overrides[flag] if flag in self.overrides else operator.attrgetter(key)(load_recipe(str(RECIPE)))

    def timings(
        self, name: str, runs: Mapping[str, pathlib.Path], drafts: int, nodes: int, temperature: float = 0.0
    ) -> dict[str, dict[str, Any]]:
        """Figures by mode of the drafters of trainings, which alternate in one process with one plain decoding.

        They are those of report.json: tokens_per_second, speedup, break_even_tau, time_split. Needs a quiet machine.
        Other runs or settings under the same name are measured again.
        """
        sampled = temperature > 0
        values = {
            "decode.compare": "(" + "".join(f"'{run}'," for run in runs.values()) + ")",
            "decode.modes": f"('{BASELINE}','{DRAFT}')" if sampled else f"('{BASELINE}','{DRAFT}','{TREE}')",
            "decode.num_drafts": drafts,
            "decode.tree.nodes": nodes,
            "decode.temperature": temperature,
            "decode.num_prompts": TIMED_PROMPTS,
        }
        flags = {"config": RECIPE, **{f"config.{key}": value for key, value in values.items()}, **self.overrides}
        folder = self.run(Stage(name, "domino_jax.decode", flags, ("output", name), brief=True))
        drafters = json.loads((folder / "compare.json").read_text())["drafters"]
        return {name: drafters[run.name]["modes"] for name, run in runs.items()}

    def _on_answers(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Flags of a training: what the command line gives goes over what the study gives, if the training reads it."""
        given = {flag.removeprefix("config."): text for flag, text in self.overrides.items()}
        stated = {"drafter.head": "domino", "train.loss": "own", "train.dpace_alpha": None, **values, **given}
        choices = [stated[key] for key in ("drafter.head", "train.loss", "train.dpace_alpha")]
        read = values | {key: text for key, text in given.items() if not unread(key, *choices)}
        flags = {"config": RECIPE, **{f"config.{key}": value for key, value in read.items()}}
        rows = self.workdir / "rows.jsonl"
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
        places = {str(self.workdir): "WORKDIR", f"{ROOT}/": "./"}
        flags = {key: str(value) for key, value in stage.flags.items()}
        for place, name in places.items():
            flags = {key: value.replace(place, name) for key, value in flags.items()}
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


def parser_of(description: str, steps: int) -> argparse.ArgumentParser:
    """The flags that all studies have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder of the rows and of all runs")
    parser.add_argument("--steps", type=int, default=steps, help="steps of each training")
    parser.add_argument("--seeds", type=seeds_of, default=[0], help="joined by commas; a run of each kind for each")
    parser.add_argument("--only", default="", help="names joined by commas: run these alone")
    parser.add_argument("--minutes", type=float, default=0.0, help="save and stop after this time; 0: no limit")
    parser.add_argument("--page", type=pathlib.Path, help="the page that gets the table; default: WORKDIR/tables.md")
    parser.add_argument("--small", action="store_true", help="a random target and a few steps: a test of the command")
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
    options.page = options.page or options.workdir / "tables.md"
    unknown = [name for name in options.only if name not in names(options)]
    if unknown:
        parser.error(f"--only={unknown[0]}: choose among {', '.join(names(options))}")
    if options.small:
        options.steps = 2
        options.workdir.mkdir(parents=True, exist_ok=True)
        overrides = small_overrides(options.workdir) + overrides
    return options, overrides


def seeds_of(text: str) -> list[int]:
    seeds = list(map(int, text.split(",")))
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice")
    return seeds


def small_overrides(folder: pathlib.Path) -> list[str]:
    """Flags for a golden target of four random layers, with prompts of token ids, which this writes into `folder`."""
    cases = json.loads((GOLDEN / "golden.json").read_text())["generate"]
    files = {"held_out": cases[:1], "prompts": cases[1:]}
    for name, chosen in files.items():
        rows = [{"id": f"{name}{place}", "token_ids": case["prompt"]} for place, case in enumerate(chosen)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "target.path": GOLDEN / "target",
        "drafter.mask_token_id": 259,
        "drafter.num_layers": 1,
        "drafter.block_size": 4,
        "drafter.domino.gru_hidden_dim": 16,
        "drafter.dflash2.rank": 8,
        "drafter.target_layer_ids": "(1,2,3)",  # the usual ones of EAGLE-3 do not fit so few layers
        "data.train": folder / "prompts.jsonl",
        "data.max_length": 64,
        "train.batch_size": 2,
        "train.num_anchors": 8,
        "eval.prompts": folder / "held_out.jsonl",
        "decode.max_new_tokens": 8,
        "decode.tree.lanes": 4,
        "decode.tree.nodes": 4,
        "decode.cache_length": 128,
        "regenerate.max_new_tokens": 16,
    }
    return [f"--config.{key}={value}" for key, value in changes.items()]


def write(
    options: argparse.Namespace, overrides: Sequence[str], module: str, names: Sequence[str], section: Mapping[str, Any]
) -> None:
    """Puts a table into the page and beside it, and prints it.

    names: of the flags that the command on the page prints. section: "name", "title", "rows", "columns", and "says",
    sentences about them.
    """
    values = {**vars(options), "seeds": ",".join(map(str, options.seeds))}
    words = [f"python -m {module} --workdir=WORKDIR", *(f"--{name}={values[name]}" for name in names)]
    words += [] if options.small else overrides
    seeds = "one seed" if len(options.seeds) == 1 else f"{len(options.seeds)} seeds: mean ± half their range"
    text = f"""## {section["title"]}

```
{" ".join(words)}
```

{section["says"]} {options.steps} steps; {seeds}. {conditions(("jax", "flax", "optax"))}"""
    print(publish(options.page, section["name"], section["rows"], section["columns"], text), flush=True)


def run_main(main: Callable[[], None]) -> None:
    """Runs `main`; a user's mistake is one message with its exit code."""
    try:
        main()
    except DominoError as error:
        print(f"error: {error}" if not isinstance(error, OutOfTime) else str(error), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
