"""The dry run of an evaluation: what it needs by its compiled programs, and (slow) that none gathers weights."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from configs import qwen3
from domino_jax.forecast import dry_run_evaluation
from domino_jax.forecast.dry_run import target_shapes
from domino_jax.method.optimizer import make_optimizer
from domino_jax.models import sharding
from domino_jax.recipe import builders
from domino_jax.training.estimates import device_bytes
from tests.helpers.decoding_models import random_models
from tests.helpers.paths import ROOT


@functools.lru_cache
def found() -> dict:
    """Two layers on one device, two prompts at a time, five candidates for the head."""
    config = qwen3.get_config("unused")
    config.target.dtype = "float32"
    config.decode.cache_length, config.decode.max_new_tokens, config.eval.batch_size = 64, 16, 2
    config.decode.head_candidates = 5
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    models = random_models()
    optimizer = make_optimizer(config.train.optimizer)
    _, state = builders.state_maker(config.train, models.drafter, optimizer, mesh)
    params = target_shapes(models.target, mesh)
    judged = dry_run_evaluation.examine_evaluation(config, models.target, models.drafter, mesh, state, params)
    return judged | {"expected": [device_bytes(params), device_bytes(state.params)]}


def test_the_figures_of_an_evaluation_are_json():
    assert json.loads(json.dumps(found()))["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}


def test_the_peak_holds_both_copies_of_the_weights_and_the_training_state():
    target, drafter = found()["expected"]
    assert (found()["target_bytes_per_chip"], found()["drafter_bytes_per_chip"]) == (target, drafter)
    assert found()["resident_bytes_per_chip"] > target + 3 * drafter  # weights, and two moments of each
    assert found()["peak_bytes_per_chip"] > found()["resident_bytes_per_chip"] + target + drafter


def weight_gathers(text, params):
    """How many all-gathers in loop bodies give a whole matrix of the parameters, in either order of its axes."""
    matrices = {tuple(sorted(leaf.shape)) for leaf in jax.tree.leaves(params) if len(leaf.shape) == 2}
    shapes = {}
    for gather in re.finditer(r"= (.*?) all-gather(?:-start)?\(.*channel_id=(\d+).*while/body", text):
        dims = re.findall(r"\w+\[([\d,]*)\]", gather[1])[-1]  # a start gives operand and result
        shapes[gather[2]] = tuple(sorted(int(size) for size in dims.split(",") if int(size) > 1))
    return sum(shape in matrices for shape in shapes.values())


COMPILE = """
import dataclasses, json
from tests.forecast.test_dry_run_evaluation import weight_gathers
import jax, numpy as np
from configs import qwen3
from domino_jax.recipe import builders as building
from domino_jax.forecast import dry_run, dry_run_evaluation
from domino_jax.models import sharding
from domino_jax.forecast import topologies
from domino_jax.method.optimizer import make_optimizer
from domino_jax.method.settings import BASELINE
from domino_jax.method.pair import Models
from domino_jax.models.qwen3 import Qwen3
from domino_jax.training.evaluation_layout import EvaluationLayout
config = qwen3.get_config("Qwen/Qwen3-8B")
config.drafter.num_layers, config.drafter.target_layer_ids = 1, (0, 1)
mesh = sharding.make_mesh(1, -1, 1, topologies.devices_of("v5e:4x4"))
shapes = dataclasses.replace(dry_run.shapes_of(config.target.path), num_hidden_layers=3)
target = Qwen3(shapes, np.dtype("bfloat16"))
drafter = building.drafter_of(building.drafter_config_of(config, shapes, 0), config)
state = building.state_maker(config.train, drafter, make_optimizer(config.train.optimizer), mesh)[1]
params = dry_run.target_shapes(target, mesh)
figures = dry_run_evaluation.examine_evaluation(config, target, drafter, mesh, state, params)
layout = EvaluationLayout(mesh, shapes, drafter)


def gathers(mesh, params, drafter, drafter_params):
    models = Models(target, params, drafter, drafter_params)
    generator = building.evaluation_generator(config, models, ())
    with jax.set_mesh(mesh):
        programs = dry_run_evaluation.compile_programs(models, generator, mesh)
    programs.pop("prefill")
    return sum(weight_gathers(program.as_text(), params) for program in programs.values())


placed = layout.target_params(params), layout.drafter, layout.drafter_params(state.best_params)
figures["gathers"] = gathers(layout.mesh, *placed)
# As the training step wants the weights, for comparison: plain decoding alone.
dry_run_evaluation.MODES = (BASELINE,)
figures["as_trained"] = gathers(mesh, params, drafter, state.params)
print(json.dumps(figures))
"""


@pytest.mark.slow(minutes=2)
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs requirements-compile.txt")
def test_no_round_of_an_evaluation_gathers_weights_on_sixteen_chips():
    """Three layers of Qwen3-8B and one of its drafter, trained over fsdp=16."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mesh"] == {"data": 2, "fsdp": 1, "tensor": 8}
    assert found["as_trained"] >= 3 * 7  # each matrix of each layer: what the layout is for
    assert found["gathers"] == 0
    assert found["peak_bytes_per_chip"] < 16e9
