"""Steps of a tiny random model on a mesh in a separate process with fake CPU devices (tests/training/test_meshes.py).

    JAX_NUM_CPU_DEVICES=8 python -m tests.helpers.mesh_run '{"name": {"mesh": [1, 8, 1], "steps": 20, ...}, ...}'

Prints one JSON object: name → the losses and gradient norms of the steps.
"""

import functools
import json
import sys

import jax
import numpy as np

from domino_jax.method.curriculum import lambda_base
from domino_jax.method.drafters import new_drafter
from domino_jax.method.heads.dflash2 import SelectorLoss
from domino_jax.method.heads.eagle3_model import Eagle3Loss
from domino_jax.method.heads.markov import MarkovLoss
from domino_jax.method.heads.xpress import XpressLoss
from domino_jax.method.losses import Loss
from domino_jax.method.optimizer import learning_rate, make_optimizer
from domino_jax.method.state import init_state
from domino_jax.method.step import make_train_step
from domino_jax.models import sharding, slices
from tests.helpers.decoding_models import VOCAB, random_models
from tests.helpers.models import Model, random_tokens, tiny_drafter, tiny_target

ROWS, LENGTH, ANCHORS, TOTAL = 8, 24, 5, 20


def rows_of(count: int = ROWS, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Random rows whose first three tokens are a prompt."""
    mask = np.ones((count, length), np.float32)
    mask[:, :3] = 0.0
    tokens = np.asarray(random_tokens((count, length), seed=9, vocab=VOCAB))  # the smallest of the targets'
    return {"tokens": tokens, "loss_mask": mask, "row_ids": np.arange(count, dtype=np.int32)}


@functools.lru_cache
def models(head: str, **choices):
    if head == "eagle3":
        pair = random_models(head=head, **choices)
        target = Model(pair.target.config, pair.target, pair.target_params)
        return target, Model(pair.drafter.config, pair.drafter, pair.drafter_params)
    target = tiny_target(tied=False)
    return target, tiny_drafter(target.config, head=head, layers=1, target_layer_ids=(0,), **choices)


OWN_LOSSES = {"markov": MarkovLoss, "dflash2": SelectorLoss, "xpress": XpressLoss}


def run(mesh, steps=TOTAL, accumulate=1, remat=False, attention_blocks=32, slice_blocks=100, drafter=None, **losses):
    """[[loss, gradient norm], …] of `steps` steps on a mesh of these sizes; drafter: of `models`, Domino when None."""
    size = int(np.prod(mesh))
    made = sharding.make_mesh(*mesh, devices=jax.devices()[:size])
    target, small = models(**(drafter or {"head": "domino"}))
    drafter, slices.BLOCKS = new_drafter(small.config, remat=remat), attention_blocks
    head = small.config.head
    choices = {"gamma": 4.0, "slice_blocks": slice_blocks, **losses}
    loss = Eagle3Loss(passes=3) if head == "eagle3" else OWN_LOSSES.get(head, Loss)(**choices)
    schedule = learning_rate(1e-2, TOTAL, 0.1)
    optimizer = make_optimizer("adamw")
    kv_heads = target.config.num_key_value_heads

    def start(key):
        return init_state(drafter, optimizer, key)

    places = sharding.param_shardings(made, jax.eval_shape(start, jax.random.key(0)), kv_heads)
    with jax.set_mesh(made):
        state = jax.jit(start, out_shardings=places)(jax.random.key(0))
        params = jax.device_put(target.params, sharding.param_shardings(made, target.params, kv_heads))
        step = make_train_step(
            target.module,
            drafter,
            optimizer,
            num_anchors=ANCHORS,
            learning_rate=schedule,
            curriculum=lambda step: lambda_base(step, TOTAL, 1.0, 1.0),
            loss=loss,
            accumulate=accumulate,
            shardings=(places, sharding.replicated(made)),
        )
        measured = []
        for _ in range(steps):
            state, metrics = step(state, params, sharding.global_batch(made, rows_of()), jax.random.key(11))
            measured.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        split = [leaf for leaf in jax.tree.leaves(state.params) if not leaf.sharding.is_fully_replicated]
    return {"steps": measured, "split": len(split)}


if __name__ == "__main__":
    jax.config.update("jax_default_matmul_precision", "highest")
    print(json.dumps({name: run(**settings) for name, settings in json.loads(sys.argv[1]).items()}))
