"""The train command on a golden target, in this process: its rows, its flags, its exit code and what it leaves."""

import json
import os
import pathlib
import shutil
from typing import NamedTuple

import pytest

from domino_jax.evals.run import Runner
from domino_jax.recipe.readers import unread
from domino_jax.runtime.files import make_once
from domino_jax.training.metrics import read_rows
from tests.helpers.commands import run
from tests.helpers.paths import ROOT

GOLDEN = ROOT / "tests" / "golden" / "tied_shift"
CASES = json.loads((GOLDEN / "golden.json").read_text())["generate"]
STEPS = 8
DOMINO = {  # a small drafter of the default head
    "config.drafter.mask_token_id": 259,
    "config.drafter.num_layers": 1,
    "config.drafter.target_layer_ids": "(1,3)",
    "config.drafter.block_size": 4,
    "config.drafter.domino.gru_hidden_dim": 16,
    "config.drafter.domino.emb_dim": 8,
    "config.train.num_anchors": 8,
}


def write_rows(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def training_rows() -> list[dict]:
    """The golden target's own answers to the golden prompts."""
    return [
        {
            "token_ids": case["prompt"] + case["output"],
            "loss_mask": [0] * len(case["prompt"]) + [1] * len(case["output"]),
        }
        for case in CASES
    ]


def training_files(folder: pathlib.Path, prompts: int = 2) -> tuple[pathlib.Path, pathlib.Path]:
    """(training rows, held-out prompts) as files."""
    held_out = [{"id": f"p{index}", "token_ids": case["prompt"]} for index, case in enumerate(CASES[:prompts])]
    return write_rows(folder / "rows.jsonl", training_rows()), write_rows(folder / "prompts.jsonl", held_out)


def arguments(files, workdir, drafter=DOMINO, **changes) -> list[str]:
    """The words of a run of STEPS steps without evaluations; `changes` name flags, with __ for their dots.

    Keys that the head or its loss does not read are left out.
    """
    values = {
        "config": ROOT / "configs" / "tiny.py",
        "workdir": workdir,
        "distributed": "off",  # the tests share a process, whose devices are in use already
        "config.target.path": GOLDEN / "target",
        **drafter,
        "config.data.train": files[0],
        "config.data.regenerate": False,
        "config.data.layout": "pad",
        "config.data.max_length": 144,
        "config.train.steps": STEPS,
        "config.train.batch_size": 2,
        "config.train.log_every": 1,
        "config.checkpoint.every": 4,
        "config.eval.every": 0,
        "config.eval.final": False,
        "config.eval.prompts": files[1],
        "config.decode.max_new_tokens": 16,
        "config.decode.num_drafts": 3,  # of 4
        "config.decode.cache_length": 128,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    head, loss = values.get("config.drafter.head", "domino"), values.get("config.train.loss", "own")
    read = {key: value for key, value in values.items() if not unread(key.removeprefix("config."), head, loss)}
    return [f"--{key}={value}" for key, value in read.items()]


def start(argv: list[str]) -> int:
    """Runs the command in this process and returns its exit code."""
    return run("train", *argv)


def losses(workdir: pathlib.Path) -> dict[int, str]:
    """Step → its loss, to the last bit."""
    return {row["step"]: row["loss"].hex() for row in read_rows(workdir / "metrics.jsonl") if "loss" in row}


def weights(workdir: pathlib.Path) -> bytes:
    return (workdir / "export" / "model.safetensors").read_bytes()


class FinishedRun(NamedTuple):
    """files: its training rows and held-out prompts.  workdir: copied by tests that change it."""

    files: tuple[pathlib.Path, pathlib.Path]
    workdir: pathlib.Path


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One folder for all processes of a session."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def train_once(workdir: pathlib.Path, argv_of) -> pathlib.Path:
    """The workdir of a finished run, trained by the first process that needs it. argv_of: its flags by its folder.

    The parts of a round are timed in test_decode_command.py alone.
    """

    def make(fresh: pathlib.Path) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Runner, "time_rounds", lambda *_: {})
            assert start(argv_of(fresh)) == 0

    return make_once(workdir, make)


def finished_run(folder: pathlib.Path) -> FinishedRun:
    """STEPS steps of a Domino drafter, evaluated after the last one and decoded at the end."""

    def write_files(fresh: pathlib.Path) -> None:
        fresh.mkdir()
        training_files(fresh)

    rows = make_once(folder / "rows", write_files)
    files = rows / "rows.jsonl", rows / "prompts.jsonl"
    flags = {"config__eval__every": STEPS, "config__eval__final": True}
    return FinishedRun(files, train_once(folder / "finished", lambda fresh: arguments(files, fresh, **flags)))


def interrupted(workdir: pathlib.Path, copy: pathlib.Path, step: int) -> pathlib.Path:
    """A copy of a finished run as it was after the checkpoint of a step, but for the rows after it."""
    shutil.copytree(workdir, copy)
    later = [path for path in (copy / "checkpoints").iterdir() if path.name.isdigit() and int(path.name) > step]
    for path in (*later, copy / "export", copy / "report"):
        shutil.rmtree(path, ignore_errors=True)
    for name in ("finished.json", "checkpoints/tau.json"):
        (copy / name).unlink(missing_ok=True)
    return copy
