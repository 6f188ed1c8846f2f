"""The same rows give the same step on any mesh, however it is cut into slices, micro-batches and recomputed layers."""

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from domino_jax.models import sharding
from domino_jax.runtime.errors import DominoError
from tests.helpers.mesh_run import TOTAL, run

RUNS = {
    "one": {"mesh": [1, 1, 1]},
    "data": {"mesh": [8, 1, 1], "steps": 6},
    "fsdp": {"mesh": [1, 8, 1], "steps": 6},
    # Two key/value heads do not divide by four: they lie whole.
    "tensor": {"mesh": [1, 2, 4], "steps": 3},
    "cube in pieces": {
        "mesh": [2, 2, 2],
        "steps": 3,
        "accumulate": 2,
        "remat": True,
        "attention_blocks": 2,
        "slice_blocks": 2,
    },
}


@functools.lru_cache
def measured():
    """Every run of RUNS, in one process with eight fake devices."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.helpers.mesh_run", json.dumps(RUNS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["data", "fsdp", "tensor", "cube in pieces"])
def test_losses_and_gradients_agree_across_meshes(name):
    ours = np.array(measured()[name]["steps"])
    plain = np.array(measured()["one"]["steps"])
    assert len(ours) == RUNS[name]["steps"] and len(plain) == TOTAL
    np.testing.assert_allclose(ours[:, 0], plain[: len(ours), 0], rtol=1e-5)
    np.testing.assert_allclose(ours[:3, 1], plain[:3, 1], rtol=1e-5)


def test_the_state_is_split_over_fsdp_and_tensor_and_not_over_data():
    assert measured()["data"]["split"] == 0
    assert min(measured()[name]["split"] for name in ("fsdp", "cube in pieces")) > 5


def test_the_loss_falls_so_that_the_runs_compare_something():
    losses = np.array(measured()["one"]["steps"])[:, 0]
    assert losses[-1] < losses[0] - 0.5


def test_a_step_in_pieces_equals_the_plain_one():
    """Loss and gradient norm of two steps, the second one's parameters coming from the first."""
    pieces = {"accumulate": 4, "remat": True, "attention_blocks": 2, "slice_blocks": 2}
    ours, plain = (run((1, 1, 1), steps=2, dpace_alpha=0.5, **choices)["steps"] for choices in (pieces, {}))
    np.testing.assert_allclose(ours, plain, rtol=1e-5)


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
