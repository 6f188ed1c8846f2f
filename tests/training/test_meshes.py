"""The same rows give the same step on any mesh, however it is cut into slices, micro-batches and recomputed layers."""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from domino_jax.method.names import ROW_DRAFTERS
from domino_jax.models import sharding
from domino_jax.runtime.errors import DominoError

PLAIN = {"one": {"mesh": [1, 1, 1]}, "one, D-PACE": {"mesh": [1, 1, 1], "steps": 3, "dpace_alpha": 0.5}}
# Two key/value heads do not divide by four: they lie whole.
MESHES = {"data": [4, 1, 1], "fsdp": [1, 4, 1], "tensor": [1, 1, 4]}
PIECES = {"accumulate": 2, "remat": True, "attention_blocks": 2, "slice_blocks": 2, "dpace_alpha": 0.5}
RUNS = PLAIN | {name: {"mesh": mesh, "steps": 3} for name, mesh in MESHES.items()}
RUNS["cube in pieces"] = {"mesh": [2, 2, 2], "steps": 2, **PIECES}
MARKOV = {
    "head": "markov",
    "markov_head_type": "rnn",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
NESTED = {"rank_scales": [0.5, 1.0]}
RUNS["one, Markov"] = {"mesh": [1, 1, 1], "steps": 2, "drafter": MARKOV, **NESTED}
for HEAD in ROW_DRAFTERS:
    RUNS[f"one, {HEAD}"] = {"mesh": [1, 1, 1], "steps": 2, "drafter": {"head": HEAD}}
    RUNS[f"cube, {HEAD}"] = {**RUNS[f"one, {HEAD}"], "mesh": [2, 2, 2], "accumulate": 2, "remat": True}
RUNS["cube, Markov"] = {**RUNS["one, Markov"], "mesh": [2, 2, 2], "accumulate": 2, "slice_blocks": 2}
DFLASH2 = {"head": "dflash2", "shift_label": False}
RUNS["one, DFlash2"] = {"mesh": [1, 1, 1], "steps": 2, "drafter": DFLASH2, "contiguous": False}
RUNS["cube, DFlash2"] = {**RUNS["one, DFlash2"], "mesh": [2, 2, 2], "accumulate": 2, "slice_blocks": 2, "remat": True}


@functools.lru_cache
def measured():
    """Every run of RUNS, in one process with eight fake devices."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.helpers.mesh_run", json.dumps(RUNS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("data", "one"),
        ("fsdp", "one"),
        ("tensor", "one"),
        ("cube in pieces", "one, D-PACE"),
        ("cube, Markov", "one, Markov"),
        ("cube, DFlash2", "one, DFlash2"),
        *((f"cube, {head}", f"one, {head}") for head in ROW_DRAFTERS),
    ],
)
def test_losses_and_gradients_agree_across_meshes(name, plain):
    """Loss and gradient norm of some steps, each step's parameters coming from the one before."""
    ours = measured()[name]["steps"]
    assert len(ours) >= 2
    np.testing.assert_allclose(ours, measured()[plain]["steps"][: len(ours)], rtol=1e-5)


def test_the_state_is_split_over_fsdp_and_tensor_and_not_over_data():
    assert measured()["data"]["split"] == 0
    assert min(measured()[name]["split"] for name in ("fsdp", "cube in pieces")) > 5


def test_the_loss_falls_so_that_the_runs_compare_something():
    losses = np.array(measured()["one"]["steps"])[:, 0]
    assert losses[-1] < losses[0] - 0.5


def test_a_mesh_that_does_not_use_all_devices_is_refused():
    with pytest.raises(DominoError, match=r"mesh.data=2, mesh.fsdp=1, mesh.tensor=1 .* but there are 1"):
        sharding.make_mesh(2, 1, 1)


def test_minus_one_is_the_rest():
    assert dict(sharding.make_mesh(1, -1, 1).shape) == {"data": 1, "fsdp": 1, "tensor": 1}


def test_a_batch_that_cannot_be_cut_is_refused_with_the_multiple_it_needs():
    mesh = sharding.make_mesh(1, -1, 1)
    sharding.check_rows(mesh, 6, 3)
    with pytest.raises(
        DominoError,
        match=r"train.batch_size 6 .* train.accumulate 4; make it a multiple of 4, as --config.train.batch_size=8",
    ):
        sharding.check_rows(mesh, 6, 4)
