"""What passes move, by the compilers for devices that are not here: ratios that must not grow."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, sys
import jax
from benchmarks.compilers import decode, program_text, programs as p
from domino_jax.models import sharding
chip, tensor, labels = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
mesh = sharding.make_mesh(1, 1, tensor, decode.devices_of(chip, tensor))
models = p.models_on(mesh, "0.6b", layers=4)
with jax.set_mesh(mesh):
    moved = {"must": p.must_move(models, p.state_on(mesh, models))}
    programs = p.chains(mesh, models) | p.trees(mesh, models)
    for label in labels:
        text = decode.compile_program(mesh, *programs[label]).as_text()
        moved[label] = program_text.traffic(text, cache=decode.CACHES.get(chip, 0) // 2)
        moved["sorted " + label] = any("151936]{" in line for line in text.splitlines() if " sort(" in line)
print(json.dumps(moved))
"""
COMPILERS = importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax_cuda12_plugin")
pytestmark = [
    pytest.mark.slow(minutes=2),
    pytest.mark.skipif(not COMPILERS, reason="needs requirements-compile.txt"),
]


def moved(chip: str, tensor: int, *labels: str) -> dict:
    """Bytes of programs of four layers of Qwen3-0.6B, whose vocabulary weighs more than they do."""
    command = [sys.executable, "-c", COMPILE, chip, str(tensor), *labels]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("chip, tensor", [("v5p", 4), ("h200", 1)])
def test_a_pass_moves_little_more_than_it_must(chip, tensor):
    """Seen: v5p 1.01, 1.12 and 1.24; H200 without what its cache keeps 1.00, 1.00 and 1.16."""
    found = moved(chip, tensor, "step", "verify17", "verify64")
    assert found["step"] / found["must"]["step"] == pytest.approx(1.0, abs=0.05)
    assert found["verify17"] / found["must"]["verify17"] < 1.18
    assert found["verify64"] / found["verify17"] < 1.3


@pytest.mark.parametrize("chip", ["v5p", "h200"])
def test_a_tree_moves_little_more_than_a_chain_and_sorts_no_vocabulary(chip):
    """Seen: v5p 1.29 (1.21 before attention added its mask) and 0.21; H200 without what its cache keeps 1.16, 0.16."""
    found = moved(chip, 1, "head", "head64", "tree64", "verify17", "verify64")
    assert not found["sorted tree64"]
    assert found["verify64"] / found["verify17"] < 1.35
    assert found["tree64"] / found["head"] < 0.25
    assert found["head64"] / found["head"] < 0.25 and not found["sorted head64"]
