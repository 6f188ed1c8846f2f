"""Compiled programs are kept where every process of the next start finds them."""

import json
import os
import subprocess
import sys

import pytest

from launch.local import free_port
from tests.helpers.paths import ROOT

ONE_OF_TWO = """
import collections, json, sys
import jax, jax.numpy as jnp, numpy as np
from domino_jax.models import sharding
from domino_jax.runtime.remote import open_path
from domino_jax.weights.loading import keep_compiled

folder, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
keep_compiled(open_path(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # the program is a small one
counts = collections.Counter()
mesh = sharding.make_mesh(2, 1, 1)
rows = sharding.global_batch(mesh, {"rows": np.ones((8, 8), "float32")})["rows"]
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
jax.jit(lambda x: (jnp.sin(x) @ x.T).sum(), out_shardings=sharding.replicated(mesh))(rows).block_until_ready()
print(json.dumps([counts["cache_hits"], counts["compile_requests_use_cache"]]))
"""


def start(folder):
    """[programs found, programs needed] of two processes."""
    names = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_NUM_CPU_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    port = str(free_port())
    both = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, folder, str(rank), port],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment | {"JAX_PLATFORMS": "cpu"},
        )
        for rank in range(2)
    ]
    return [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in both]


@pytest.mark.long
def test_every_process_finds_its_programs_in_a_bucket_at_the_second_start(bucket):
    assert start(f"{bucket}/run/.xla_cache") == [[0, 1], [0, 1]]
    assert start(f"{bucket}/run/.xla_cache") == [[1, 1], [1, 1]]
