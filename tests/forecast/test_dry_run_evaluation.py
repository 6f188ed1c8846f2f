"""The dry run of an evaluation: what it needs by its compiled programs, and (slow) that none gathers weights."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from configs import qwen3
from domino_jax.forecast import compiled, dry_run_evaluation
from domino_jax.forecast.dry_run import target_shapes
from domino_jax.method.optimizer import make_optimizer
from domino_jax.models import sharding
from domino_jax.recipe import builders
from domino_jax.training.estimates import device_bytes
from domino_jax.training.evaluation_layout import EvaluationLayout
from tests.helpers.decoding_models import random_models
from tests.helpers.paths import ROOT

MODES = ["prefill", "autoregressive", "backbone", "domino"]
GATHERS = """
  %a = bf16[64,32]{1,0} all-gather(%p), channel_id=1, metadata={op_name="jit(rounds)/while/body/q_proj/x"}
  %b = (bf16[4,64]{1,0}, bf16[32,64]{1,0}) all-gather-start(%q), channel_id=2, metadata={op_name="while/body/y"}
  %c = bf16[32,64]{1,0} all-gather-done(%b), channel_id=2, metadata={op_name="while/body/y"}
  %d = bf16[64,32]{1,0} all-gather(%r), channel_id=3, metadata={op_name="jit(rounds)/before/the/loop"}
  %e = f32[2,17,64]{1,0} all-gather(%s), channel_id=4, metadata={op_name="while/body/activations"}
  %f = bf16[1,64,32]{1,0} all-gather(%t), channel_id=5, metadata={op_name="while/body/z"}
"""


@functools.lru_cache
def found() -> dict:
    """Of two layers on one device, two prompts at a time, five candidates for the head."""
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


def test_every_program_of_an_evaluation_is_compiled():
    assert list(found()["collectives"]) == MODES and list(found()["bytes_per_round"]) == MODES[1:]
    assert json.loads(json.dumps(found()))["mesh"] == {"data": 1, "fsdp": 1, "tensor": 1}


def test_the_peak_holds_both_copies_of_the_weights_and_the_training_state():
    target, drafter = found()["expected"]
    assert (found()["target_bytes_per_chip"], found()["drafter_bytes_per_chip"]) == (target, drafter)
    assert found()["resident_bytes_per_chip"] > target + 3 * drafter  # weights, and two moments of each
    assert found()["peak_bytes_per_chip"] > found()["resident_bytes_per_chip"] + target + drafter


def test_a_drafted_round_reads_both_models_and_the_head_for_each_corrected_draft():
    """With caches of 2 rows of 64 slots of two layers of the target and of the drafter's layers."""
    models = random_models()
    target, drafter = models.target.config, models.drafter.config
    cache = {c: 4 * 2 * 2 * 64 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim for c in (target, drafter)}
    lm_head = 4 * target.vocab_size * target.hidden_size
    backbone, head = (device_bytes(models.drafter_params[part]) for part in ("backbone", "head"))
    read = found()["bytes_per_round"]
    weights = found()["expected"][0] - (0 if target.tie_word_embeddings else lm_head)
    assert read["autoregressive"] == weights + cache[target]
    assert read["backbone"] == read["autoregressive"] + lm_head + backbone + cache[drafter]
    unread = (64 - 2 * 5) * 4 * drafter.emb_dim  # rows of the head's vocabulary that are no candidates of two prompts
    assert read["domino"] == read["backbone"] + (drafter.block_size - drafter.suffix_start) * (head - unread)


def test_gathers_of_whole_matrices_in_loops_are_counted():
    assert sorted(compiled.gathers_in_loops(GATHERS)) == [(1, 64, 32), (2, 17, 64), (32, 64), (64, 32)]
    params = {
        "q_proj": {"kernel": jax.ShapeDtypeStruct((32, 64), "float32")},
        "scale": jax.ShapeDtypeStruct((64,), "f4"),
    }
    assert dry_run_evaluation.weight_gathers(GATHERS, params) == 3
    assert dry_run_evaluation.weight_gathers("", params) == 0


def test_the_estimate_counts_rounds_by_bandwidth():
    """819 GB/s: a plain round 10 ms, drafted ones 20 and 30; 3 groups of 100 tokens, of which rounds emit 3."""
    judged = {"num_prompts": 5, "batch_size": 2, "max_new_tokens": 100, "peak_bytes_per_chip": 15e9}
    judged["bytes_per_round"] = {"autoregressive": 8.19e9, "backbone": 16.38e9, "domino": 24.57e9}
    made = dry_run_evaluation.on_chip(judged, 100, 2.0, "v5e:4x4")
    assert (made["seconds"], made["first_seconds"]) == (pytest.approx(5.0), pytest.approx(8.0))
    assert (made["fits"], made["share_of_time"]) == (True, pytest.approx(0.025))
    assert dry_run_evaluation.on_chip(judged, 100, None, "cpu")["seconds"] is None


def test_what_is_printed_names_both_memories_and_the_time():
    text = "\n".join(dry_run_evaluation.lines(found() | dry_run_evaluation.on_chip(found(), 10, 0.1, "v5e:4x4"), 16e9))
    for words in (
        "64 prompts, 2 at a time",
        "of the training",
        "of 16 GB: fits",
        "all-gathers of weights in the loops: 0",
    ):
        assert words in text
    assert "estimate, by bandwidth alone" in text and "of the steps between two" in text


def test_one_device_is_its_own_layout():
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    models = random_models()
    layout = EvaluationLayout(mesh, models.target.config, models.drafter)
    assert layout.mesh.size == 1
    placed = jax.device_put(models.target_params, sharding.replicated(mesh))
    kept = layout.target_params(placed)
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(kept), strict=True))


COMPILE = """
import dataclasses, json
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
config = qwen3.get_config("Qwen/Qwen3-8B")
config.drafter.num_layers, config.drafter.target_layer_ids = 1, (0, 1)
mesh = sharding.make_mesh(1, -1, 1, topologies.devices_of("v5e:4x4"))
shapes = dataclasses.replace(dry_run.shapes_of(config.target.path), num_hidden_layers=3)
target = Qwen3(shapes, np.dtype("bfloat16"))
drafter = building.drafter_of(building.drafter_config_of(config, shapes, 0), config)
state = building.state_maker(config.train, drafter, make_optimizer(config.train.optimizer), mesh)[1]
params = dry_run.target_shapes(target, mesh)
found = dry_run_evaluation.examine_evaluation(config, target, drafter, mesh, state, params)
# As the training step wants the weights, for comparison: plain decoding alone.
dry_run_evaluation.MODES = (BASELINE,)
models = Models(target, params, drafter, state.params)
generator = building.evaluation_generator(config, models, ())
with jax.set_mesh(mesh):
    text = dry_run_evaluation.compile_programs(models, generator, mesh)[0][BASELINE].as_text()
found["as_trained"] = dry_run_evaluation.weight_gathers(text, params)
print(json.dumps(found))
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
    assert found["weight_gathers_in_loop"] == 0
    assert found["peak_bytes_per_chip"] < 16e9
