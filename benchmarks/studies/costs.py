"""What a drafter's training costs: the part of a study that no command has.

step_seconds({"domino": [flags of its training], …})   seconds of a training step, alternating in one process
curve_of(FOLDER)                                        τ of the run's own evaluations, by steps
compiled_rounds()                                       bytes of a round in plain steps of 8B on an H200, by head
"""

import csv
import pathlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence

import jax
from etils import epath

from benchmarks.tables import DATA, DOCS
from domino_jax import train
from domino_jax.models import sharding
from domino_jax.recipe import builders, cli
from domino_jax.training.metrics import read_rows
from domino_jax.weights import hf
from domino_jax.weights.loading import load_target

TURNS = 7  # timed steps of each training


def step_seconds(trainings: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The median by name; all steps alternate, so that a noisy machine disturbs them alike.

    trainings: the arguments of domino_jax.train, by name.
    """
    with tempfile.TemporaryDirectory() as folder:
        steps = {name: step_of(arguments, pathlib.Path(folder, name)) for name, arguments in trainings.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(TURNS + 1):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                if turn:  # the first one compiles
                    times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def step_of(arguments: Sequence[str], workdir: pathlib.Path):
    """A function that takes a step of a training, always with its first batch."""
    config = cli.parse(["train", *arguments], ("config",)).config
    loaded, mesh = load_target(config.target.path, config.target.dtype), sharding.make_mesh(1, 1, 1)
    tokenizer = hf.load_tokenizer(hf.resolve_folder(config.target.path))
    vocab, folder = loaded.model.config.vocab_size, epath.Path(workdir)
    batches = builders.batches_of(config, config.data.train, tokenizer, vocab, folder, mesh, lambda _: None)
    drafter = builders.drafter_of(train.final_drafter_config(config, loaded, batches, folder), config)
    optimizer, key = builders.optimizer_of(config.train), jax.random.key(0, impl="threefry2x32")
    with jax.set_mesh(mesh):
        make_state, shapes = builders.state_maker(config.train, drafter, optimizer, mesh)
        step = builders.train_step_of(config, loaded.model, drafter, optimizer, mesh, shapes)
        with batches.start(None) as stream:
            batch = sharding.global_batch(mesh, next(stream))
        held = [make_state(key)]

    def take() -> None:
        with jax.set_mesh(mesh):
            held[0], metrics = step(held[0], loaded.params, batch, key)
            jax.block_until_ready((held[0], metrics))

    return take


def curve_of(folder: pathlib.Path) -> tuple[list[float], list[float]]:
    """(steps, τ) of the evaluations of a training; folder: of its drafter."""
    run = folder.with_name(folder.name.split("_passes")[0])
    measured = [row for row in read_rows(run / "metrics.jsonl") if "eval_tau" in row]
    return [row["step"] for row in measured], [row["eval_tau"] for row in measured]


def compiled_rounds() -> dict[str, float]:
    """By head, from the data file of benchmarks.compilers.decode --what=heads."""
    with (DOCS / DATA / "compile_heads.csv").open(encoding="utf-8") as file:
        row = next(csv.DictReader(file))
    moved = {name.removesuffix(" moved"): float(value) for name, value in row.items() if name.endswith(" moved")}
    return {name.removeprefix("round_"): value / moved["step"] for name, value in moved.items() if name != "step"}
