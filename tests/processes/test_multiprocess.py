"""The train command as several processes, through the local launcher: killed, stopped, moved, and never a loss changed.

All runs are the same 60 steps of a tiny recipe, and share one cache of compiled programs.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from assets.target_folder import save_target
from domino_jax.training.metrics import read_rows
from tests.helpers.models import MASK_TOKEN, tiny_target
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import write_rows

pytestmark = pytest.mark.slow

STEPS = 60
LAUNCHERS: list[subprocess.Popen] = []
CANARY = "hf_canary_that_must_not_be_written"
# What runs is the train command, as `python -m` runs it.
TRAIN = """
import runpy
runpy.run_module("domino_jax.train", run_name="__main__", alter_sys=True)
"""
# The same with evaluations that take two minutes and look for signals now and then.
SLOW_EVALUATIONS = """
import time
from domino_jax.decoding.evaluate import Evaluation

whole = Evaluation.__call__

def wait(self, params, between):
    for _ in range(60):
        time.sleep(2)
        between()
    return whole(self, params, between)

Evaluation.__call__ = wait
"""
# What a launcher or scheduler around pytest may have set.
PLACE = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_NUM_CPU_DEVICES")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The flags of the tiny run: a random target's folder, rows of token ids, and a recipe cut to seconds."""
    folder = tmp_path_factory.mktemp("inputs")
    target = tiny_target()
    save_target(folder / "target", target.config, target.params, "float32", token_ids={"eos_token_id": 1})
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 33, 24)
    rows = [
        {"token_ids": rng.integers(2, MASK_TOKEN, length).tolist(), "loss_mask": [0] * 4 + [1] * (length - 4)}
        for length in lengths.tolist()
    ]
    values = {
        "target.path": folder / "target",
        "drafter.mask_token_id": MASK_TOKEN,
        "drafter.num_layers": 1,
        "drafter.target_layer_ids": "(0,1)",
        "drafter.block_size": 4,
        "drafter.domino.gru_hidden_dim": 16,
        "drafter.domino.emb_dim": 8,
        "data.train": write_rows(folder / "rows.jsonl", rows),
        "data.regenerate": False,
        "data.layout": "pad",
        "data.max_length": 32,
        "train.steps": STEPS,
        "train.batch_size": 4,
        "train.num_anchors": 6,
        "train.log_every": 1,
        "train.optimizer": "adamw",
        "checkpoint.every": 3,
        "eval.every": 0,
        "eval.final": False,
    }
    return [f"--config={ROOT / 'configs' / 'tiny.py'}", *(f"--config.{key}={value}" for key, value in values.items())]


def start(recipe, workdir, processes=2, devices=2, max_restarts=0, code=TRAIN, **environment):
    """The launcher as a process; its ranks log to <workdir>-logs."""
    command = [sys.executable, "-m", "launch.local", f"--processes={processes}", f"--devices={devices}"]
    command += [f"--log_dir={logs(workdir)}", f"--max_restarts={max_restarts}", "--"]
    command += [sys.executable, "-c", code, *recipe, f"--workdir={workdir}"]
    kept = {name: value for name, value in os.environ.items() if name not in PLACE}
    environment = {"HF_TOKEN": CANARY, **environment}
    launcher = subprocess.Popen(command, cwd=ROOT, env={**kept, **environment}, stdout=subprocess.DEVNULL)
    LAUNCHERS.append(launcher)
    return launcher


def logs(workdir):
    return workdir.with_name(f"{workdir.name}-logs")


@pytest.fixture(autouse=True, scope="module")
def no_run_is_left():
    """Ends what is left of a run that a test gave up on."""
    yield
    for launcher in LAUNCHERS:
        if launcher.poll() is None:
            left = list(ranks(launcher).values())
            kill(launcher.pid)
            for process in left:
                kill(process)
            launcher.wait()


def finish(launcher, workdir, code=0, seconds=900):
    left = launcher.wait(timeout=seconds)
    output = "\n".join(path.read_text(errors="replace")[-3_000:] for path in sorted(logs(workdir).glob("*.log")))
    assert left == code, output


def complete(recipe, workdir, **how):
    finish(start(recipe, workdir, **how), workdir)
    return Run.of(workdir)


def losses(workdir):
    """{step: the loss' exact bits}; a loss that is logged twice with two values fails here."""
    found = {}
    for row in read_rows(workdir / "metrics.jsonl"):
        if "loss" in row:
            assert found.setdefault(row["step"], row["loss"].hex()) == row["loss"].hex()
    return found


def arrays(folder):
    """The state of a checkpoint as numpy arrays, wherever its shards were."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return checkpointer.restore(folder, restore_args=wanted)


class Run(NamedTuple):
    """What came out of a finished run."""

    losses: dict[int, str]
    state: list[bytes]
    export: bytes

    @classmethod
    def of(cls, workdir):
        state = arrays(workdir / "checkpoints" / str(STEPS) / "state")
        exported = (workdir / "export" / "model.safetensors").read_bytes()
        return cls(losses(workdir), [leaf.tobytes() for leaf in jax.tree.leaves(state)], exported)


def assert_identical(run, other):
    assert list(run.losses) == list(range(1, STEPS + 1))
    assert {step for step in run.losses if run.losses[step] != other.losses[step]} == set()
    assert run.state == other.state
    assert run.export == other.export


def assert_close(found, expected):
    """Every loss within 1e-6 of the other one's, relative."""
    assert found.keys() == expected.keys()
    pairs = [(float.fromhex(found[step]), float.fromhex(expected[step])) for step in found]
    assert max(abs(one - other) / other for one, other in pairs) < 1e-6


def last_step(workdir):
    rows = read_rows(workdir / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def wait_for_step(launcher, workdir, step, seconds=900):
    end = time.monotonic() + seconds
    while last_step(workdir) < step:
        assert launcher.poll() is None and time.monotonic() < end
        time.sleep(0.02)


def ranks(launcher):
    """The process ids of the launcher's own children, by rank."""
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    places = {}
    for child in map(int, children):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            # A child between fork and exec still has the launcher's environment.
            places |= {int(entry.partition(b"=")[2]): child for entry in variables if entry[:15] == b"JAX_PROCESS_ID="}
    return places


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="module")
def plain(recipe, tmp_path_factory):
    """The uninterrupted run of 2 processes × 2 devices that the others are held against: (workdir, Run)."""
    workdir = tmp_path_factory.mktemp("plain") / "run"
    return workdir, complete(recipe, workdir)


@pytest.fixture(scope="module")
def stopped(recipe, tmp_path_factory):
    """A run of 2 × 2 that SIGTERM stopped: (workdir, the step it stopped after, seconds from the signal to the end)."""
    workdir = tmp_path_factory.mktemp("stopped") / "run"
    return workdir, *stop(recipe, workdir, random.Random(8).randint(5, STEPS - 20))


def stop(recipe, workdir, step, rank=None, **how):
    """rank: the process that gets the signal; None for the launcher, which passes it on to all."""
    launcher = start(recipe, workdir, **how)
    wait_for_step(launcher, workdir, step)
    started = time.monotonic()
    os.kill(launcher.pid if rank is None else ranks(launcher)[rank], signal.SIGTERM)
    finish(launcher, workdir, code=42)
    return last_step(workdir), time.monotonic() - started


def test_nothing_written_holds_a_token_of_the_environment(plain):
    workdir, _ = plain
    files = [path for folder in (workdir, logs(workdir)) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


def test_sigterm_saves_the_current_step_and_leaves_with_42_within_ten_seconds(stopped):
    workdir, step, seconds = stopped
    assert step < STEPS
    assert (workdir / "checkpoints" / str(step) / "manifest.json").exists()
    assert seconds < 10


def test_a_stopped_run_of_two_processes_continues_bit_for_bit(recipe, plain, stopped, tmp_path):
    """A signal to one process stops both, also in a resumed run, whose steps are ahead of JAX's own count."""
    shutil.copytree(stopped[0], tmp_path / "run")
    assert stopped[1] < stop(recipe, tmp_path / "run", stopped[1] + 5, rank=1)[0] < STEPS
    assert_identical(complete(recipe, tmp_path / "run"), plain[1])


def test_after_sigterm_in_an_evaluation_the_next_start_evaluates_and_the_best_drafter_is_exported(
    recipe, plain, tmp_path
):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "token_ids": [2 + i, 3, 4]} for i in range(20)])
    evaluates = {
        "eval.every": 20,
        "eval.prompts": prompts,
        "checkpoint.every": 20,
        "decode.max_new_tokens": 40,
        "decode.cache_length": 64,
    }
    recipe = [*recipe, *(f"--config.{key}={value}" for key, value in evaluates.items())]
    workdir = tmp_path / "run"
    launcher = start(recipe, workdir, code=SLOW_EVALUATIONS + TRAIN)
    wait_until(lambda: (workdir / "checkpoints" / "20" / "manifest.json").exists(), 900)
    time.sleep(3)
    started = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    finish(launcher, workdir, code=42)
    assert time.monotonic() - started < 60  # of the two minutes that the evaluation sleeps
    assert last_step(workdir) == 20 and evaluations(workdir) == []
    found = complete(recipe, workdir)
    assert (found.losses, found.state) == (plain[1].losses, plain[1].state)
    assert evaluations(workdir) == [20, 40, 60]
    # The end once more, with another drafter as the best by τ: two processes restore it from its checkpoint.
    (workdir / "finished.json").unlink()
    marks = workdir / "checkpoints" / "tau.json"
    taus = json.loads(marks.read_text())
    marks.write_text(json.dumps({step: {**taus[step], "tau": 60 - int(step)} for step in taus}))
    found = complete(recipe, workdir)
    assert json.loads((workdir / "finished.json").read_text())["exported_step"] == 20
    command = [sys.executable, "-m", "domino_jax.export", f"--workdir={workdir}", f"--output={tmp_path / 'alone'}"]
    subprocess.run(command, cwd=ROOT, check=True)
    assert found.export == (tmp_path / "alone" / "model.safetensors").read_bytes() != plain[1].export


def evaluations(workdir):
    return [row["step"] for row in read_rows(workdir / "metrics.jsonl") if "eval_tau" in row]


def test_a_checkpoint_of_two_processes_continues_in_one(recipe, plain, stopped, tmp_path):
    shutil.copytree(stopped[0], tmp_path / "run")
    run = complete(recipe, tmp_path / "run", processes=1, devices=4)
    assert_close(run.losses, plain[1].losses)


def test_a_checkpoint_of_one_process_continues_in_two(recipe, plain, tmp_path):
    workdir = tmp_path / "run"
    stop(recipe, workdir, 20, processes=1, devices=4)
    assert_close(complete(recipe, workdir).losses, plain[1].losses)


@pytest.mark.slow(minutes=3)
def test_a_run_killed_ten_times_ends_with_the_weights_of_the_uninterrupted_one(recipe, plain, tmp_path):
    """kill -9 of all processes: at random steps (also within saves), and twice while they start."""
    workdir, chance = tmp_path / "run", random.Random(3)
    launcher = start(recipe, workdir, max_restarts=10)
    seen: dict[int, set[str]] = {}
    for life in range(10):
        if life in (3, 7):
            wait_until(lambda: len(ranks(launcher)) == 2)
            time.sleep(chance.uniform(0, 4))
        else:
            wait_for_step(launcher, workdir, 5 * life + chance.randint(1, 4))
            time.sleep(chance.uniform(0, 0.1))
        for step, loss in losses(workdir).items():
            seen.setdefault(step, set()).add(loss)
        victims = list(ranks(launcher).values())
        for process in victims:
            kill(process)
        wait_until(lambda gone=victims: not set(gone) & set(ranks(launcher).values()))
    finish(launcher, workdir)
    assert_identical(Run.of(workdir), plain[1])
    # What was computed again after a kill was computed to the same bits.
    assert {step for step, values in seen.items() if values != {plain[1].losses[step]}} == set()


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
