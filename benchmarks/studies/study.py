"""Drafters of the tiny target, trained on the same rows and judged on the same answers.

    study.compare(options, overrides, variants, section)

Each stage is a command of the package in a separate process. The target answers the training prompts once, and the
held-out prompts once at each temperature (domino_jax.regenerate). Every variant is trained on those rows
(domino_jax.train), and one pass over the held-out answers gives τ of all variants and their differences, paired by
answer (domino_jax.evaluate). Start a study again to continue it: the commands go on where they were stopped, or refuse
what was made with other values. Two starts with other names in --only may run beside each other.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.studies import costs
from benchmarks.studies.figures import Figures, figures_of, group_rows, pair_rows, write
from benchmarks.tables import DATA, ROOT, write_csv
from domino_jax.data.prompts import read_jsonl
from domino_jax.evals.evaluation import EVALUATION
from domino_jax.recipe.readers import reads, unread
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import write_whole
from domino_jax.weights import hf

RECIPE = ROOT / "configs" / "tiny.py"
TINY = ROOT / "assets" / "tiny_qwen3"
GOLDEN = ROOT / "tests" / "golden" / "tied_shift"  # the random target of --small
TEMPERATURES = (0, 1)
CHECKPOINTS = 5  # of each training; the newest three are kept
LENGTHS = (0, 64, 96, 128)  # of prompts, in tokens: the lower edges of the rows of a table
SEARCH = slice(1_000, 1_256)  # training prompts that the recipe does not learn from, for --rates


@dataclasses.dataclass(frozen=True)
class Variant:
    """One drafter: its title in the table, and the recipe keys that its training changes.

    trained_as: the training whose drafter it takes, by name; "" for a separate one.
    passes: over a block, in which it drafts; 0: as its folder says.
    rate_of: the training for which its learning rate was chosen, by name; "": its own.
    """

    title: str
    changes: Mapping[str, Any]
    trained_as: str = ""
    passes: int = 0
    rate_of: str = ""

    def at(self, training: str, rate: float) -> "Variant":
        """The same with a learning rate, trained under a name with it."""
        changes = {**self.changes, "train.learning_rate": rate}
        return dataclasses.replace(self, changes=changes, trained_as=f"{training}_lr{rate:g}")


def compare(
    options: argparse.Namespace, overrides: Sequence[str], variants: Mapping[str, Variant], section: Mapping[str, str]
) -> None:
    """Trains and judges the variants, and writes the table, its data file and that of all pairs.

    variants: by name; the first one is what the table compares the others with.
    section: "name", "title", "module" and "says", sentences about the variants.
    """
    study = Study(options.workdir, overrides)
    variants = {name: one for name, one in variants.items() if not options.only or name in options.only}
    study.answers("rows", "data.train", TINY / "prompts_train.jsonl", {})
    study.answers("search", "eval.prompts", study.apart(), {"num_prompts": 0, "temperature": 0})
    if options.rates:
        variants, searched = with_best_rates(study, variants, options)
        write_csv(options.page.parent / DATA / f"{section['name']}_rates.csv", searched)
    evaluations: dict[int, list[Figures]] = {temperature: [] for temperature in TEMPERATURES}
    tokens = {temperature: study.held_out(temperature) for temperature in TEMPERATURES}
    for seed in options.seeds:
        folders = study.folders(variants, seed, options.steps)
        for temperature, seeds in evaluations.items():
            seeds.append(
                study.evaluate(f"{section['name']}_seed{seed}_t{temperature}", f"judged_t{temperature}", folders)
            )
    rows = [
        {"drafter": one.title, "training": one.trained_as or name, "weights_m": parameters(folders[name]) / 1e6}
        | figures_of(name, evaluations)
        for name, one in variants.items()
    ]
    if options.costs:
        for row, figures in zip(rows, costs_of(study, variants, options, section["name"]), strict=True):
            row |= figures | {"speed": row["mean_t0"] / figures["round_over_step"]}
            row |= {"speed_h200": figures["h200_over_step"] and row["mean_t0"] / figures["h200_over_step"]}
    titles = {name: one.title for name, one in variants.items()}
    for end, table in (
        ("pairs", pair_rows(titles, evaluations)),
        ("groups", group_rows(titles, evaluations, tokens)),
    ):
        write_csv(options.page.parent / DATA / f"{section['name']}_{end}.csv", table)
    write(options, overrides, section, rows)


def with_best_rates(
    study: "Study", variants: Mapping[str, Variant], options: argparse.Namespace
) -> tuple[dict[str, Variant], list[dict[str, Any]]]:
    """(the variants with the learning rate that has the highest τ, a row for each training of the search).

    From the middle rate on, lower ones and then higher ones are tried as long as τ rises. The trainings are those of
    the first seed, whole, judged on the answers to prompts that nothing else uses.
    """
    rates, chosen, rows = sorted(options.rates), {}, []
    best: dict[str, float] = {}  # by the name of a training

    def judge(name: str, one: Variant, rate: float) -> float:
        training = one.trained_as or name
        tried = dataclasses.replace(one.at(training, rate), passes=0)
        folder = study.train(name, tried, options.seeds[0], options.steps)
        [figures] = study.evaluate(f"search_{training}_lr{rate:g}", "search", {name: folder})["drafters"].values()
        rows.append({"training": training, "learning_rate": rate, "tau": list(figures["tau"].values())[-1]})
        return rows[-1]["tau"]

    for name, one in variants.items():
        training = one.trained_as or name
        searched = one.rate_of if one.rate_of in best else training
        if searched not in best:
            taus = functools.cache(lambda place, name=name, one=one: judge(name, one, rates[place]))
            place = len(rates) // 2
            for step in (-1, 1):
                while 0 <= place + step < len(rates) and taus(place) < taus(place + step):
                    place += step
            best[searched] = rates[place]
        chosen[name] = one.at(training, best[searched])
    return chosen, rows


def costs_of(
    study: "Study", variants: Mapping[str, Variant], options: argparse.Namespace, table: str
) -> list[dict[str, Any]]:
    """For each variant the time of a training step and of a round, and how far equal time takes it.

    Equal time is that of the whole training with the cheapest step. τ after it is that of the run's own evaluations,
    on a line between the two around it. Rounds are in plain steps: seconds here, and bytes of 8B on an H200, None for
    a drafter whose round was not compiled.
    """
    seeds, steps = options.seeds, options.steps
    folders = study.folders(variants, seeds[0], steps)
    trainings = {one.trained_as or name: study.train_flags(one, seeds[0], steps) for name, one in variants.items()}
    seconds = costs.step_seconds(trainings)
    timed = study.evaluate(f"{table}_rounds", "held_out_t0", folders, limit=32, round_seconds="measure")["drafters"]
    compiled = costs.compiled_rounds()
    rows = []
    for name, one in variants.items():
        of_step = seconds[one.trained_as or name]
        done = min(seconds.values()) * steps / of_step
        curves = [costs.curve_of(study.folders(variants, seed, steps)[name]) for seed in seeds]
        by_drafts = timed[name]["round_seconds"]
        row = {"step_ms": 1e3 * of_step, "steps_in_time": round(done)}
        row["tau_in_time"] = statistics.fmean(float(np.interp(done, *curve)) for curve in curves)
        row["tau_at_end"] = statistics.fmean(curve[1][-1] for curve in curves)
        row |= {"plain_ms": 1e3 * by_drafts["0"], "round_over_step": list(by_drafts.values())[-1] / by_drafts["0"]}
        rows.append(row | {"h200_over_step": compiled.get(name)})
    return rows


# ----------------------------------------------------------------------------------------------------- stages


class Study:
    """The stages in `workdir`.

    overrides: further --config.KEY=VALUE flags, which go to every command that reads their key.
    """

    def __init__(self, workdir: str | os.PathLike, overrides: Sequence[str] = ()):
        self.workdir = pathlib.Path(workdir).expanduser().resolve()
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.overrides = dict(text.removeprefix("--config.").split("=", 1) for text in overrides)

    def answers(self, name: str, key: str, prompts: pathlib.Path, values: Mapping[str, Any]) -> None:
        """The target's answers to the prompts of the override `key`, or to these, in NAME.jsonl.

        values: of the section regenerate.
        """
        flags = {"prompts": self.overrides.get(key, prompts), "output": self.workdir / f"{name}.jsonl"}
        changes = {f"regenerate.{field}": value for field, value in values.items()}
        self.run(name, "domino_jax.regenerate", flags, self.overrides_of("regenerate") | changes)

    def held_out(self, temperature: int) -> dict[str, int]:
        """Lets the target answer the held-out prompts, and names in a copy the task of each answer.

        Returns:
            By task, "KIND, the edge below its prompt's tokens", the tokens that the rounds of its answers emit.
        """
        name, prompts = f"held_out_t{temperature}", TINY / "prompts_heldout.jsonl"
        self.answers(name, "eval.prompts", prompts, {"num_prompts": 0, "temperature": temperature})
        kinds = {row["id"]: row["kind"] for _, row in read_jsonl(prompts)}
        rows, tokens = [row for _, row in read_jsonl(self.workdir / f"{name}.jsonl")], collections.Counter()
        for row in rows:
            answer = sum(row["loss_mask"])
            length = len(row["token_ids"]) - answer
            edge = max(edge for edge in LENGTHS if edge <= length)
            row["task"] = f"{kinds.get(row['id'], 'other')}, {edge}"
            tokens[row["task"]] += answer - 1
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_whole(self.workdir / f"judged_t{temperature}.jsonl", text)
        return {task: count for task, count in tokens.items() if count}

    def overrides_of(self, command: str) -> dict[str, str]:
        """The overrides that a command reads; it refuses others."""
        return {key: text for key, text in self.overrides.items() if reads(command, key)}

    def apart(self) -> pathlib.Path:
        """Prompts that are neither learned nor held out, by which learning rates and checkpoints are chosen."""
        lines = (TINY / "prompts_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        write_whole(self.workdir / "search_prompts.jsonl", "".join(lines[SEARCH]))
        return self.workdir / "search_prompts.jsonl"

    def folders(self, variants: Mapping[str, Variant], seed: int, steps: int) -> dict[str, pathlib.Path]:
        """By name the folder of each variant, trained where it is not yet."""
        return {name: self.train(name, one, seed, steps) for name, one in variants.items()}

    def train(self, name: str, one: Variant, seed: int, steps: int) -> pathlib.Path:
        """The folder of a variant that was trained on rows.jsonl."""
        name = f"{one.trained_as or name}_seed{seed}_steps{steps}"
        folder = self.workdir / name
        self.run(name, "domino_jax.train", {"workdir": folder}, self.train_values(one, seed, steps))
        return in_passes(folder, one.passes) if one.passes else folder

    def train_values(self, one: Variant, seed: int, steps: int) -> dict[str, Any]:
        """The recipe keys of a training."""
        every = -(-steps // CHECKPOINTS)
        values = {
            "seed": seed,
            "train.steps": steps,
            "checkpoint.every": every,
            "eval.every": every,
            "eval.final": False,
            **one.changes,
            "eval.num_prompts": 64,
            "eval.answers": self.workdir / "search.jsonl",
        }
        given = {"drafter.head": "domino", "train.loss": "own", "train.dpace_alpha": None, **values, **self.overrides}
        choices = [given[key] for key in ("drafter.head", "train.loss", "train.dpace_alpha")]
        # The command refuses keys that a head does not read.
        values |= {key: text for key, text in self.overrides_of("train").items() if not unread(key, *choices)}
        return values | {"data.train": self.workdir / "rows.jsonl", "data.regenerate": False}

    def train_flags(self, one: Variant, seed: int, steps: int) -> list[str]:
        """The arguments of a training, but its workdir."""
        values = self.train_values(one, seed, steps)
        return [f"--config={RECIPE}", *(f"--config.{key}={value}" for key, value in values.items())]

    def evaluate(
        self, name: str, answers: str, folders: Mapping[str, pathlib.Path], limit: int = 0, **flags: str
    ) -> Figures:
        """{"drafters": by name, "pairs": by the names of two} of evaluation.json, on the answers of a file.

        limit: the first answers alone; 0: all.
        """
        output = self.workdir / f"evaluation_{name}"
        flags |= {"answers": self.workdir / f"{answers}.jsonl", "drafters": ",".join(map(str, folders.values()))}
        values = {"decode.num_prompts": limit, **self.overrides_of("evaluate")}
        self.run(output.name, "domino_jax.evaluate", {**flags, "output": output}, values)
        evaluation = json.loads((output / EVALUATION).read_text())
        names = {str(folder): name for name, folder in folders.items()}
        return {
            "drafters": {names[path]: figures for path, figures in evaluation["drafters"].items()},
            "pairs": {tuple(names[path] for path in pair["drafters"]): pair["tau"] for pair in evaluation["pairs"]},
        }

    def run(self, name: str, module: str, flags: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Runs a command with the recipe, whose output goes to NAME.log; not again once it ended well with these flags.

        Raises:
            DominoError: it left with an exit code.
        """
        command = [module, f"--config={RECIPE}", *(f"--{key}={value}" for key, value in flags.items())]
        command += [f"--config.{key}={value}" for key, value in values.items()]
        record, log = self.workdir / f"{name}.command", self.workdir / f"{name}.log"
        text = "\n".join(command) + "\n"
        if record.exists() and record.read_text() == text:
            print(f"{name}: already finished", flush=True)
            return
        print(f"{name}: running, see {log}", flush=True)
        environment = {"JAX_COMPILATION_CACHE_DIR": str(self.workdir / ".xla_cache"), **os.environ}
        with log.open("a", encoding="utf-8") as file:
            options = {"cwd": ROOT, "env": environment, "stdout": file, "stderr": subprocess.STDOUT}
            code = subprocess.run([sys.executable, "-m", *command], check=False, **options).returncode
        if code:
            last = log.read_text(encoding="utf-8").strip().splitlines()[-5:]
            raise DominoError(f"{name} left with exit code {code}; {log} ends:\n" + "\n".join(last))
        write_whole(record, text)


def in_passes(run: pathlib.Path, passes: int) -> pathlib.Path:
    """A folder beside a training's with the same drafter, which drafts in that many passes over a block."""
    folder = run.with_name(f"{run.name}_passes{passes}")
    shutil.copytree(run / "export", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"xpress_num_passes": passes}))
    return folder


def parameters(folder: pathlib.Path) -> int:
    """Parameters of a drafter, in the folder of its training or in its own."""
    export = folder / "export"
    tensors = hf.open_tensors(export if export.exists() else folder)
    return sum(math.prod(tensors.read(name).shape) for name in tensors)


# ----------------------------------------------------------------------------------------------- command line


def parser_of(description: str) -> argparse.ArgumentParser:
    """The flags that all studies have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--workdir", type=pathlib.Path, required=True, help="folder of the answers and all trainings")
    parser.add_argument("--steps", type=int, default=700, help="steps of each training")
    parser.add_argument("--rates", type=numbers_of(float), default=[], help="learning rates to choose from, by commas")
    parser.add_argument("--costs", action="store_true", help="times steps and rounds too, on a quiet machine")
    parser.add_argument("--seeds", type=numbers_of(int), default=[0], help="joined by commas; all trainings for each")
    parser.add_argument("--only", default="", help="names of drafters, joined by commas: these alone")
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


def numbers_of(kind: type) -> Callable[[str], list]:
    def numbers(text: str) -> list:
        values = list(map(kind, text.split(",")))
        if len(set(values)) < len(values):
            raise argparse.ArgumentTypeError(f"{text} names a value twice")
        return values

    return numbers


def small_overrides(folder: pathlib.Path) -> list[str]:
    """Flags for a golden target of four random layers, with prompts of token ids, which this writes into `folder`."""
    cases = json.loads((GOLDEN / "golden.json").read_text())["generate"]
    files = {"held_out": cases[:2], "prompts": cases[2:]}
    for name, chosen in files.items():
        rows = [{"id": f"{name}{place}", "token_ids": case["prompt"]} for place, case in enumerate(chosen)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "target.path": GOLDEN / "target",
        "drafter.mask_token_id": 259,
        "drafter.num_layers": 1,
        "drafter.target_layer_ids": "(1,2,3)",  # the usual ones of EAGLE-3 do not fit so few layers
        "data.train": folder / "prompts.jsonl",
        "data.max_length": 64,
        "train.batch_size": 2,
        "train.num_anchors": 8,
        "eval.prompts": folder / "held_out.jsonl",
        "regenerate.max_new_tokens": 16,
    }
    return [f"--config.{key}={value}" for key, value in changes.items()]


def run_main(main: Callable[[], None]) -> None:
    """Runs `main`; a user's mistake is one message with its exit code."""
    try:
        main()
    except DominoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
