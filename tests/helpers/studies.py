"""The studies of benchmarks/ on the golden target: their flags, and stand-ins for the commands that they run."""

import pathlib
import types
from collections.abc import Callable

import pytest

from benchmarks.studies.study import Study
from tests.helpers.train_runs import CASES, GOLDEN, write_rows


def prompt_files(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """(training prompts, one held-out prompt) as files."""
    sides = {"train": CASES[1:], "held_out": CASES[:1]}
    rows = {
        name: [{"id": f"{name}{index}", "token_ids": case["prompt"]} for index, case in enumerate(cases)]
        for name, cases in sides.items()
    }
    return tuple(write_rows(folder / f"{name}.jsonl", rows[name]) for name in sides)


def golden_flags(folder: pathlib.Path, **own) -> list[str]:
    """The flags of a study of a small drafter on the golden target; `own` has __ for dots, None leaves a key out."""
    train, held_out = prompt_files(folder)
    changes = {
        "target.path": GOLDEN / "target",
        "drafter.mask_token_id": 259,
        "drafter.num_layers": 1,
        "drafter.block_size": 4,
        "drafter.target_layer_ids": "(1,2,3)",  # the usual ones of EAGLE-3 do not fit so few layers
        "data.train": train,
        "data.max_length": 64,
        "train.batch_size": 2,
        "train.num_anchors": 8,
        "eval.prompts": held_out,
        "decode.max_new_tokens": 8,
        "decode.cache_length": 128,
        "regenerate.max_new_tokens": 16,
    } | {key.replace("__", "."): value for key, value in own.items()}
    return [f"--config.{key}={value}" for key, value in changes.items() if value is not None]


def page_of(study: types.ModuleType, folder: pathlib.Path, *flags: str) -> str:
    """Runs a study in `folder`; returns its page."""
    study.main([f"--workdir={folder / 'work'}", f"--output={folder / 'docs'}", *flags])
    return (folder / "docs" / study.PAGE).read_text()


def stand_in(monkeypatch: pytest.MonkeyPatch, execute: Callable) -> Callable:
    """Puts `execute(study, command, name)` in the place of a study's commands."""
    monkeypatch.setattr(Study, "execute", lambda study, *stage: execute(study, *stage))
    return execute


def nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every command of a study fails the test."""
    stand_in(monkeypatch, lambda study, command, name: pytest.fail(f"{name} was run again"))
