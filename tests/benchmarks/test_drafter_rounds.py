"""benchmarks/device/drafter_rounds.py: what it times, and the table."""

import numpy as np

from benchmarks.device import drafter_rounds
from benchmarks.device.drafter_rounds import Shape
from benchmarks.device.random_models import target_config, target_shapes
from domino_jax.models.qwen3 import Qwen3
from domino_jax.weights import loading, random_weights


def small_target() -> loading.LoadedTarget:
    model = Qwen3(target_config("small"), np.dtype("float32"))
    return loading.LoadedTarget("small", model, random_weights.random_params(target_shapes(model), "float32"), None, ())


def test_the_step_and_a_round_of_every_shape_are_timed():
    shapes = [Shape(1, 0, 1, 2, ()), Shape(1, 0, 1, 2, (4, 8))]
    seconds, sizes = drafter_rounds.measure(small_target(), shapes, candidates=8, rows=2, repeats=1)
    assert list(seconds) == [drafter_rounds.STEP, *(shape.name for shape in shapes)]
    # The head: a GRU 3·8·(16+8), W1 4·(16+8) and W2 96·4, two bytes each.
    assert sizes[shapes[1].name] - sizes[shapes[0].name] == 2 * (3 * 8 * 24 + 4 * 24 + 96 * 4)


def test_taps_are_spread_over_the_target_and_stop_before_its_last_layer():
    target = small_target().model.config  # three layers
    assert Shape(1, 0, 2, 4, ()).config(target).target_layer_ids == (0, 1)
    assert Shape(1, 0, 1, 4, ()).config(target).target_layer_ids == (1,)


def test_the_table_gives_what_a_round_costs_in_steps():
    shape = Shape(2, 0, 3, 4, (64, 128))
    text = drafter_rounds.table({"step": 0.02, shape.name: 0.05}, {shape.name: 3_000_000}, rows=1)
    assert "A plain step of 1 row: 20.0 ms." in text
    assert text.splitlines()[-1] == "| 2 | all | 3 | 4 | 64×128 | 50.0 | 2.50 | 5 | 3.0 |"
