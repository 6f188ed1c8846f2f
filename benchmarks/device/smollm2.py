"""The SmolLM2 pipeline as phases of campaign.py: answers, training, decoding, by the project's own commands.

Each phase runs one command of configs/smollm2_135m.py in a separate process and reads what it wrote; all of them
continue where they were stopped. The trained drafter is FOLDER/smollm2/run/export.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time
from typing import Any

from domino_jax.recipe.readers import reads
from domino_jax.runtime.errors import DataError
from domino_jax.training.metrics import read_rows

RECIPE = "configs/smollm2_135m.py"
PROMPTS = "assets/smollm2_prompts/prompts_train.jsonl"
ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """target: the folder that assets/make_smollm2.py wrote.  folder: for everything that is made.

    flags: keys of the recipe for the commands that read them, such as --config.train.steps=3000.
    """

    target: pathlib.Path
    folder: pathlib.Path
    flags: tuple[str, ...] = ()
    recipe: str = RECIPE
    prompts: str = PROMPTS

    def run(self, command: str, *flags: str) -> float:
        """Seconds that a command took; its output goes where this process' goes.

        Raises:
            DataError: it failed.
        """
        words = [sys.executable, "-m", f"domino_jax.{command}", f"--config={ROOT / self.recipe}"]
        words += [f"--config.target.path={self.target.absolute()}", *flags]
        words += [flag for flag in self.flags if reads(command, flag.removeprefix("--config.").partition("=")[0])]
        begin = time.perf_counter()
        code = subprocess.run(words, cwd=ROOT).returncode
        if code:
            raise DataError(f"{command} of {self.recipe} ended with exit code {code}.")
        return time.perf_counter() - begin

    def place(self, name: str) -> pathlib.Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder.absolute() / name


def answers(pipeline: Pipeline) -> dict[str, Any]:
    """The target answers the training prompts."""
    output = pipeline.place("answers.jsonl")
    seconds = pipeline.run("regenerate", f"--prompts={ROOT / pipeline.prompts}", f"--output={output}")
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return {"seconds": seconds, "rows": len(rows), "tokens": sum(sum(row["loss_mask"]) for row in rows)}


def training(pipeline: Pipeline) -> dict[str, Any]:
    """A drafter trained on them."""
    data = pipeline.place("answers.jsonl")
    if not data.exists():
        raise DataError(f"{data} does not exist; run the phase smollm2-answers first.")
    workdir = pipeline.place("run")
    flags = [f"--config.data.train={data}", "--config.data.regenerate=False", f"--workdir={workdir}"]
    seconds = pipeline.run("train", *flags)
    rows = read_rows(workdir / "metrics.jsonl")
    names = ("step", "loss", "accept_len", "rows_per_second", "tokens_per_second", "mfu")
    last = {name: rows[-1][name] for name in names if name in rows[-1]}
    return {"seconds": seconds, **last}


def decoding(pipeline: Pipeline) -> dict[str, Any]:
    """Held-out prompts, plain and with the drafter; "failed" where a text differs beyond near ties."""
    drafter = pipeline.place("run") / "export"
    if not drafter.exists():
        raise DataError(f"{drafter} does not exist; run the phase smollm2-training first.")
    output = pipeline.place("decoded")
    seconds = pipeline.run("decode", f"--config.drafter.path={drafter}", f"--output={output}")
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    names = ("tokens_per_second", "speedup", "tau_pooled", "break_even_tau")
    modes = {
        mode: {name: figures[name] for name in names if name in figures} for mode, figures in report["modes"].items()
    }
    identical = report["identical_outputs"]
    result = {"seconds": seconds, "modes": modes, "identical_outputs": identical}
    violations = {mode: counts["violations"] for mode, counts in identical.items() if counts["violations"]}
    if violations:
        counted = ", ".join(f"{count} with {mode}" for mode, count in violations.items())
        result["failed"] = f"texts that differ from the target's beyond near ties: {counted} (see {output}/report.json)"
    return result
