"""regenerate.py in separate processes: killed with -9, several at once, on several devices."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from launch.local import free_port
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import CASES, GOLDEN


def command(prompts, output, *more):
    argv = [sys.executable, "-m", "domino_jax.regenerate", f"--config={ROOT / 'configs' / 'tiny.py'}"]
    argv += [f"--config.target.path={GOLDEN / 'target'}", "--config.regenerate.max_new_tokens=40"]
    argv += ["--config.regenerate.batch_size=2", f"--prompts={prompts}", f"--output={output}"]
    return [*argv, *more]


def launch(argv, **variables):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(argv, cwd=ROOT, env=environment, **piped)


def launch_two(argv):
    address = f"127.0.0.1:{free_port()}"
    place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "DOMINO_HEARTBEAT_SECONDS": "10"}
    return [launch(argv, **place, JAX_PROCESS_ID=str(index)) for index in range(2)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(80 prompts, the file of a run that nobody disturbed)."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    prompts, output = folder / "prompts.jsonl", folder / "rows.jsonl"
    starts = [case["prompt"][: 4 + size] for case in CASES for size in range(20)]
    prompts.write_text("".join(json.dumps({"id": f"r{i}", "token_ids": ids}) + "\n" for i, ids in enumerate(starts)))
    process = launch(command(prompts, output))
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    return prompts, output.read_bytes()


def kill_somewhere(processes, folder, rng):
    """Waits for some rows more than there are, then a little, then kills -9 one process or all of them."""

    def lines():
        return sum(file.read_bytes().count(b"\n") for file in folder.glob("rows.jsonl*") if "meta" not in file.name)

    wanted = lines() + rng.choice([0, 1, 3, 9])
    deadline = time.monotonic() + 120
    while lines() < wanted and processes[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(rng.random() * 0.05)
    for process in rng.sample(processes, rng.randint(1, len(processes))):
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate(timeout=120)
    return lines()


@pytest.mark.slow
def test_two_real_processes_killed_and_continued_by_one_make_the_same_file(uninterrupted, tmp_path):
    prompts, whole = uninterrupted
    rng, reached = random.Random(2), []
    for _ in range(3):
        reached.append(kill_somewhere(launch_two(command(prompts, tmp_path / "rows.jsonl")), tmp_path, rng))
    assert reached == sorted(reached) and 0 < reached[-1] < 80, reached
    finish(prompts, tmp_path / "rows.jsonl", whole)


def finish(prompts, rows, whole):
    """One process answers what is missing; the file is then that of an uninterrupted run."""
    process = launch(command(prompts, rows))
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert rows.read_bytes() == whole


@pytest.mark.slow
def test_two_real_processes_make_the_file_of_one(uninterrupted, tmp_path):
    prompts, whole = uninterrupted
    processes = launch_two(command(prompts, tmp_path / "rows.jsonl"))
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    assert (tmp_path / "rows.jsonl").read_bytes() == whole
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rows.jsonl", "rows.jsonl.meta.json"]


ON_ALL_DEVICES = """
import sys
import jax
from domino_jax.recipe import cli
from domino_jax import regenerate
regenerate.process_devices = jax.local_devices
cli.run(regenerate.main, ("config", "prompts", "output"), ("distributed",), sys.argv)
"""


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [False, True], ids=["alone", "drafted"])
@pytest.mark.parametrize("devices", [2, 4])
def test_the_devices_of_a_process_share_weights_and_rows(uninterrupted, tmp_path, devices, drafter):
    """The golden target has two key/value heads: two devices split its weights, four split the rows as well."""
    prompts, whole = uninterrupted
    few = ("--config.regenerate.num_prompts=6", f"--config.regenerate.use_drafter={drafter}")
    argv = command(prompts, tmp_path / "rows.jsonl", *few)
    argv = [argv[0], "-c", ON_ALL_DEVICES, *argv[3:], f"--config.drafter.path={GOLDEN / 'drafter'}"]
    process = launch(argv, JAX_NUM_CPU_DEVICES=str(devices), PYTHONPATH=str(ROOT))
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert (tmp_path / "rows.jsonl").read_bytes().splitlines() == whole.splitlines()[:6]
