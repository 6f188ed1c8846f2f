"""Two processes on loopback: one checkpoint of both, and one opinion on which is intact."""

import contextlib
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
from tests.training.test_damaged_checkpoints import data_file, flip

AGREES = """
import json, sys
import jax
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]), coordinator_bind_address=sys.argv[2])
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.runtime.errors import DataError

mesh = Mesh(np.array(jax.devices()), ("fsdp",))
sharding = NamedSharding(mesh, P("fsdp"))
target = {"w": jax.ShapeDtypeStruct((16, 8), "float32", sharding=sharding)}
lines = []
try:
    with Checkpoints(sys.argv[1], keep=10, report=lines.append) as checkpoints:
        restored = checkpoints.restore_latest(target)
        first = restored.step if restored else 0
        best = checkpoints.best()
        if restored:
            for shard in restored.state["w"].addressable_shards:
                np.testing.assert_array_equal(shard.data, np.full((4, 8), first, np.float32))
        for step in (first + 1, first + 2):
            value = np.full((16, 8), step, np.float32)
            state = {"w": jax.make_array_from_callback((16, 8), sharding, lambda index: value[index])}
            checkpoints.mark_tau(step, 1 / step, "these answers")
            checkpoints.save(step, state, {"item": step}, {})
        checkpoints.wait()
        steps = checkpoints.folders.finished()
        print(json.dumps({"first": first, "steps": steps, "best": best, "lines": len(lines)}), flush=True)
except DataError as error:
    print(json.dumps({"refused": str(error).splitlines()[0]}), flush=True)
"""


REPEATS = """
import itertools, os, sys
os.environ |= {"JAX_COORDINATOR_ADDRESS": sys.argv[2], "JAX_PROCESS_ID": sys.argv[3], "JAX_NUM_PROCESSES": "2"}
from domino_jax.runtime import distributed
from domino_jax.recipe import cli
from domino_jax.training.checkpoints import Checkpoints

def main(flags):
    distributed.initialize()
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), P("fsdp"))
    value = np.ones((64, 1024), np.float32)
    state = {"w": jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])}
    print("ready", flush=True)
    with Checkpoints(sys.argv[1], keep=2, report=lambda line: None) as checkpoints:
        for step in itertools.count(1):
            checkpoints.save(step, state, {}, {})
            checkpoints.restore_latest(state)

cli.run(main, argv=["repeats"])
"""


@contextlib.contextmanager
def two_processes(code, workdir, **more):
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", **more}
    words = [sys.executable, "-c", code, str(workdir), f"127.0.0.1:{free_port()}"]
    how = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*words, str(rank)], **how) for rank in range(2)]
    try:
        yield both
    finally:
        for process in both:
            process.kill()


def agree(workdir):
    """What each of two processes prints."""
    with two_processes(AGREES, workdir) as both:
        return [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in both]


@pytest.mark.slow
def test_two_processes_agree_on_the_newest_intact_step(tmp_path):
    assert agree(tmp_path) == [{"first": 0, "steps": [1, 2], "best": None, "lines": 0}] * 2
    flip(data_file(tmp_path / "checkpoints" / "2"), 99)
    one, other = agree(tmp_path)
    assert one == {"first": 1, "steps": [1, 2, 3], "best": [1, 1.0], "lines": 1}
    assert other == {"first": 1, "steps": [1, 2, 3], "best": [1, 1.0], "lines": 0}
    for step in (1, 2, 3):
        flip(data_file(tmp_path / "checkpoints" / str(step)), 99)
    one, other = agree(tmp_path)
    assert one["refused"].endswith("holds no intact checkpoint.")
    assert other["refused"].startswith("process 0 cannot")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_whoever_loses_its_peer_while_it_saves_or_restores_leaves_by_a_signal_and_blames_no_file(tmp_path, victim):
    """At a random instant, so that repeats meet every part of the work. Launchers answer a signal with a new start."""
    with two_processes(REPEATS, tmp_path, DOMINO_HEARTBEAT_SECONDS="10") as both:
        for process in both:
            assert "ready\n" in iter(process.stdout.readline, "")
        moment = random.uniform(0, 1.5)
        print(f"killed after {moment} s")
        time.sleep(moment)
        both[victim].kill()
        output = both[1 - victim].communicate(timeout=60)[1]
    assert both[1 - victim].returncode == -signal.SIGABRT, output
    assert "Make room" not in output and "cannot be read" not in output
