"""The train command, stopped by a real SIGTERM in each phase without steps: the next start ends as if undisturbed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from domino_jax.training.metrics import read_rows
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import arguments, losses, training_files

pytestmark = pytest.mark.slow


# The command, which blocks in one place as in a compilation: in C, with the signal kept from the main thread.
BLOCKED = """
import ctypes, itertools, signal, sys, time
from domino_jax.recipe import builders as building, cli
from domino_jax import decode, regenerate, train
from domino_jax.evals.run import Runner
from domino_jax.decoding.queue import Queue
from domino_jax.decoding.answers import AnswerPasses

def blocked(owner, name, call=1):
    function, calls = getattr(owner, name), itertools.count(1)

    def block(*args, **named):
        if next(calls) == call:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            print("blocked", flush=True)
            ctypes.CDLL(None).sleep(120)
        return function(*args, **named)

    setattr(owner, name, block)

def slow(function):
    def wait(*args, **named):
        print("blocked", flush=True)
        time.sleep(1)
        return function(*args, **named)
    return wait

def in_step(*args, make=building.train_step_of):
    class Step:
        step = staticmethod(make(*args))
    blocked(Step, "step")
    return lambda *args: Step.step(*args)

exec(sys.argv.pop(1))
cli.run(train.main, ("config", "workdir"), ("allow_config_change", "distributed"), sys.argv)
"""
# {phase: the call that blocks it}
PHASES = {
    "regenerate": 'blocked(regenerate, "regenerate_rows")',
    "held-out answers": 'blocked(Queue, "prefill")',
    "pre-flight": 'blocked(train, "run_preflight")',
    "first compilation": "building.train_step_of = in_step",
    "compilation of an evaluation": 'blocked(AnswerPasses, "__call__")',
    "evaluation": "AnswerPasses.__call__ = slow(AnswerPasses.__call__)",
    "final decoding": 'blocked(Runner, "decode_group", call=2)',
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The flags of a run of 8 steps that regenerates its rows, evaluates twice and decodes at the end."""
    files = training_files(tmp_path_factory.mktemp("rows"))
    changes = {"config__data__train": files[1], "config__data__regenerate": True, "distributed": "auto"}
    changes |= {"config__regenerate__max_new_tokens": 40, "config__eval__every": 4, "config__eval__final": True}
    return lambda workdir: arguments(files, workdir, **changes)


@contextlib.contextmanager
def training(phase, argv):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", BLOCKED, PHASES.get(phase, ""), *argv]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finish(argv):
    with training("none", argv) as process:
        message = process.communicate(timeout=600)[0]
    assert process.returncode == 0, message
    return message


def test_stopped_in_every_phase_a_run_ends_as_the_undisturbed_one(recipe, tmp_path):
    disturbed, whole = tmp_path / "disturbed", tmp_path / "whole"
    for phase in PHASES:
        with training(phase, recipe(disturbed)) as process:
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line == "blocked\n":
                    break
            else:
                raise AssertionError(f"{phase}: {''.join(lines)}")
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            lines.append(process.communicate(timeout=60)[0])
            crowd = max(1, os.getloadavg()[0] / os.cpu_count())  # other tests may run beside this one
            assert process.returncode == -signal.SIGTERM, (phase, "".join(lines))
            assert time.monotonic() - started < 10 * crowd
            assert not (disturbed / "finished.json").exists()
    finish(recipe(disturbed))
    finish(recipe(whole))
    assert losses(disturbed) == losses(whole)
    for name in ("export/model.safetensors", "regenerated.jsonl"):
        assert (disturbed / name).read_bytes() == (whole / name).read_bytes(), name
    taus = [
        [(row["step"], row["eval_tau"]) for row in read_rows(run / "metrics.jsonl") if "eval_tau" in row]
        for run in (disturbed, whole)
    ]
    assert [step for step, _ in taus[1]] == [4, 8] and taus[0] == taus[1]
    reports = [json.loads((run / "report" / "report.json").read_text()) for run in (disturbed, whole)]
    assert reports[0]["identical_outputs"] == reports[1]["identical_outputs"]
    assert "holds a finished run" in finish(recipe(disturbed))
