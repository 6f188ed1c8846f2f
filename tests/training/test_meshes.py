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

MARKOV = {"head": "markov", "markov_head_type": "rnn"}
MARKOV |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
# Each drafter on one device, and on a mesh with some of: micro-batches, slices of the loss, recomputed layers. Two
# key/value heads do not divide by four: they lie whole.
PAIRS = {
    "Domino": ({"dpace_alpha": 0.5}, {"mesh": [2, 2, 2], "accumulate": 2, "remat": True, "attention_blocks": 2}),
    "Markov": ({"drafter": MARKOV}, {"mesh": [1, 4, 1], "accumulate": 2, "slice_blocks": 2}),
    "DFlash2": (
        {"drafter": {"head": "dflash2", "shift_label": False}, "contiguous": False},
        {"mesh": [4, 1, 1], "accumulate": 2, "slice_blocks": 2, "remat": True},
    ),
    "xPress": (
        {"drafter": {"head": "xpress", "shift_label": False}},
        {"mesh": [1, 2, 2], "accumulate": 2, "slice_blocks": 4},
    ),
    # The target has experts.
    "EAGLE-3": ({"drafter": {"head": "eagle3", "sparse": True}}, {"mesh": [2, 2, 2], "accumulate": 2, "remat": True}),
}
RUNS = {name: {"mesh": [1, 1, 1], "steps": 2, **plain} for name, (plain, _) in PAIRS.items()}
RUNS |= {f"{name} on a mesh": {**RUNS[name], **mesh} for name, (_, mesh) in PAIRS.items()}


@functools.lru_cache
def measured():
    """Every run of RUNS, in one process with eight fake devices."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.helpers.mesh_run", json.dumps(RUNS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", PAIRS)
def test_losses_and_gradients_agree_across_meshes(name):
    """Loss and gradient norm of two steps, the second step's parameters coming from the first."""
    ours, plain = measured()[f"{name} on a mesh"]["steps"], measured()[name]["steps"]
    assert len(ours) == 2 and np.isfinite(ours).all() and ours[0] != ours[1]
    np.testing.assert_allclose(ours, plain, rtol=1e-5)


@pytest.mark.long
def test_the_state_is_split_over_fsdp_and_tensor_and_not_over_data():
    split = {name: measured()[f"{name} on a mesh"]["split"] for name in PAIRS}
    assert split["DFlash2"] == 0 and min(split["Domino"], split["Markov"]) > 5


def test_a_mesh_that_does_not_use_all_devices_is_refused():
    with pytest.raises(DominoError, match=r"mesh.data=2, mesh.fsdp=1, mesh.tensor=1 .* but there are 1"):
        sharding.make_mesh(2, 1, 1)


def test_a_batch_that_cannot_be_cut_is_refused_with_the_multiple_it_needs():
    mesh = sharding.make_mesh(1, -1, 1)
    sharding.check_rows(mesh, 6, 3)
    with pytest.raises(
        DominoError,
        match=r"train.batch_size 6 .* train.accumulate 4; make it a multiple of 4, as --config.train.batch_size=8",
    ):
        sharding.check_rows(mesh, 6, 4)
