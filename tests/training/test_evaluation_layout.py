"""evaluation_layout.py on one device; over several: tests/decoding/test_decode_meshes.py."""

import jax
import numpy as np

from domino_jax.method.drafter import rows_together
from domino_jax.method.kinds import new_drafter
from domino_jax.models import sharding
from domino_jax.training.evaluation_layout import EvaluationLayout
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.target import read_target_config
from tests.helpers.train_runs import GOLDEN


def test_an_evaluation_measures_the_drafter_as_its_export_stores_it_and_the_target_as_it_is():
    target = read_target_config(GOLDEN / "target")
    config, params = load_drafter(GOLDEN / "drafter", target, np.dtype("float32"))
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    with jax.set_mesh(mesh):
        layout = EvaluationLayout(mesh, target, new_drafter(config, np.dtype("float32")))
        placed, untouched = layout.drafter_params(params), layout.target_params(params)
    exported = rows_together(jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params))
    assert jax.tree.all(jax.tree.map(np.array_equal, placed, exported))
    assert not jax.tree.all(jax.tree.map(np.array_equal, placed, rows_together(params)))
    assert jax.tree.all(jax.tree.map(np.array_equal, untouched, params))
