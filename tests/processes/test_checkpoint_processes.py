"""Two processes on loopback: one checkpoint of both, and one opinion on which is intact."""

import json
import os
import subprocess
import sys

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


def agree(workdir):
    """What each of two processes prints."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", AGREES, str(workdir), f"127.0.0.1:{free_port()}"]
    how = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*words, str(rank)], **how) for rank in range(2)]
    try:
        return [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in both]
    finally:
        for process in both:
            process.kill()


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
    assert one["refused"].startswith("none of the checkpoints")
    assert other["refused"].startswith("process 0 cannot")
