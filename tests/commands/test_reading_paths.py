"""README's two reading paths, and how many calls of the package a batch passes to the loss and a prompt to a round."""

import pathlib
import re
import sys

import pytest

import domino_jax
from domino_jax.method import losses, rounds
from domino_jax.method.drafter import Drafter
from tests.commands.test_decode_command import arguments as decode_arguments
from tests.commands.test_decode_command import write_prompts
from tests.helpers.commands import run
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import CASES, arguments, training_files

PACKAGE = pathlib.Path(domino_jax.__file__).parent


class Reached(BaseException):
    """Ends a command where its stack was read."""


def record(monkeypatch, owner, name, stacks, last=False):
    """Keeps the stack from `main` to the latest call of owner.name; the `last` one ends the command."""
    function = getattr(owner, name)

    def spy(*args, **named):
        frame, calls = sys._getframe(1), [(sys.modules[function.__module__].__file__, name)]
        while calls[-1][1] != "main":
            if pathlib.Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                calls.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        stacks[name] = calls[::-1]
        if last:
            raise Reached
        return function(*args, **named)

    monkeypatch.setattr(owner, name, spy)


def files(stack):
    """The files of a stack in the order in which they are entered."""
    return list(dict.fromkeys(pathlib.Path(file).relative_to(ROOT).as_posix() for file, _ in stack))


def path_of(text):
    """The files of the path in README whose line begins with `text`."""
    [path] = re.findall(rf"^- {text}: (.*?)(?=^- |\n\n)", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"`([\w/]+\.py)`", path)


def test_a_batch_passes_the_files_of_its_path_and_at_most_10_calls_to_the_loss(tmp_path, monkeypatch):
    stacks = {}
    record(monkeypatch, Drafter, "__call__", stacks)
    record(monkeypatch, losses.Loss, "block_sums", stacks, last=True)
    with pytest.raises(Reached):
        run("train", *arguments(training_files(tmp_path), tmp_path / "run"))
    loss = stacks["block_sums"]
    *path, drafter, last = path_of("a training step")
    # It cuts the batch into slices, and its first line lets a first reader skip it.
    assert [*path, last] == [file for file in files(loss) if file != "domino_jax/method/sliced_loss.py"]
    assert [*path, drafter] == files(stacks["__call__"])
    assert len(loss) - 1 <= 10, [name for _, name in loss]


def test_a_prompt_passes_the_files_of_its_path_and_at_most_10_calls_to_a_round(tmp_path, monkeypatch):
    stacks = {}
    for name in ("propose", "verify"):
        record(monkeypatch, rounds, name, stacks, last=name == "verify")
    prompts = write_prompts(tmp_path, [{"id": "p", "token_ids": CASES[0]["prompt"]}])
    with pytest.raises(Reached):
        run("decode", *decode_arguments(prompts, tmp_path / "out", config__decode__modes="('domino',)"))
    *path, proposing, verifying = path_of("a decoding round")
    assert [*path, proposing] == files(stacks["propose"]) and [*path, verifying] == files(stacks["verify"])
    calls = [name for _, name in stacks["propose"][:-1]]
    assert len(calls) - 1 <= 10, calls
