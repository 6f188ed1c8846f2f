"""small_models.py: one thread for a model of a few megabytes, and nothing where the user has chosen."""

import os
import pathlib
import subprocess
import sys

import pytest

from domino_jax.runtime import small_models
from domino_jax.runtime.environment import usable_cores
from domino_jax.runtime.small_models import THREADS, use_one_thread
from tests.helpers.environment import optimizing
from tests.helpers.paths import ASSETS, ROOT

TINY = str(ASSETS / "tiny_qwen3")
# Prints the share of the products' CPU time that the busiest thread had.
BUSIEST = """
import os, sys
import jax, jax.numpy as jnp
from domino_jax.runtime.small_models import use_one_thread
use_one_thread(sys.argv[1])
def ticks():
    tasks = os.listdir("/proc/self/task")
    lines = {task: open(f"/proc/self/task/{task}/stat").read().rsplit(")", 1)[1].split() for task in tasks}
    return {task: int(line[11]) + int(line[12]) for task, line in lines.items()}
step, x = jax.jit(lambda x: x @ x / 700), jnp.ones((700, 700))
step(x).block_until_ready()
before = ticks()
for _ in range(60):
    x = step(x)
x.block_until_ready()
used = [number - before.get(task, 0) for task, number in ticks().items()]
print(max(used) / sum(used))
"""


def printed(code: str, *arguments: str, **variables: str) -> float:
    environment = {name: value for name, value in optimizing().items() if name not in THREADS}
    words = [sys.executable, "-c", code, *arguments]
    output = subprocess.check_output(words, cwd=ROOT, env=environment | variables, text=True, timeout=120)
    return float(output.splitlines()[-1])


@pytest.mark.long
@pytest.mark.skipif(usable_cores() < 2 or not pathlib.Path("/proc/self/task").exists(), reason="needs two cores")
def test_a_small_target_is_computed_by_one_thread():
    assert printed(BUSIEST, TINY) > 0.9
    assert printed(BUSIEST, TINY, NPROC="2") < 0.9


@pytest.fixture
def two_cores(monkeypatch):
    """A process that may choose; its variables are restored."""
    for name in ("XLA_FLAGS", *THREADS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(small_models, "usable_cores", lambda: 2)


def test_a_line_says_that_one_thread_is_used_and_nothing_changes_where_the_user_chose(two_cores, monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    assert use_one_thread(TINY) is None and "PJRT_NPROC" not in os.environ
    monkeypatch.delenv("NPROC")
    assert use_one_thread("Qwen/Qwen3-8B") is None
    assert use_one_thread(TINY) == f"one thread: {TINY} has 9 MB of weights (set PJRT_NPROC for more threads)"
    assert os.environ["PJRT_NPROC"] == "1"
