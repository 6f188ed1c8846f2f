"""The dry run of an evaluation: what it needs by its compiled programs."""

import functools
import json

import jax

from configs import qwen3
from domino_jax.forecast import dry_run_evaluation
from domino_jax.forecast.dry_run import target_shapes
from domino_jax.method.optimizer import make_optimizer
from domino_jax.models import sharding
from domino_jax.recipe import builders
from domino_jax.training.estimates import device_bytes
from tests.helpers.decoding_models import random_models


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
