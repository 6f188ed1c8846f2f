"""A recipe for tests of its checks, and a few steps of a small one."""

import jax
import jax.numpy as jnp

from configs import qwen3
from domino_jax.method.drafters import new_drafter
from domino_jax.method.optimizer import make_optimizer
from domino_jax.method.state import init_state
from domino_jax.method.step import make_train_step
from domino_jax.models.qwen3 import Qwen3
from domino_jax.recipe.builders import drafter_config_of, loss_of
from tests.helpers.models import random_tokens


def recipe():
    """A recipe that passes every check of train."""
    config = qwen3.get_config("Qwen/Qwen3-8B")
    config.data.train = "rows.jsonl"
    return config


def set_value(config, key, value):
    *sections, name = key.split(".")
    for section in sections:
        config = config[section]
    config[name] = value


def train_recipe(recipe, target: Qwen3, target_params: dict, steps: int = 1, params: dict | None = None):
    """(drafter, its parameters before, the state after some steps on one random batch, their losses).

    params: to start from; None for fresh ones. λ is ½.
    """
    drafter = new_drafter(drafter_config_of(recipe, target.config))
    optimizer = make_optimizer("adamw")
    state = jax.jit(lambda key: init_state(drafter, optimizer, key))(jax.random.key(0))
    state = state.replace(params=jax.tree.map(jnp.copy, params)) if params else state
    before = jax.device_get(state.params)
    choices = {"learning_rate": lambda step: 1e-2, "curriculum": lambda step: 0.5, "loss": loss_of(recipe)}
    step = make_train_step(target, drafter, optimizer, num_anchors=recipe.train.num_anchors, **choices)
    tokens = random_tokens((2, 16), vocab=target.config.vocab_size - 1)
    batch = {"tokens": tokens, "loss_mask": jnp.ones(tokens.shape), "row_ids": jnp.arange(2, dtype=jnp.int32)}
    losses = []
    for _ in range(steps):
        state, metrics = step(state, target_params, batch, jax.random.key(1))
        losses.append(float(metrics["loss"]))
    return drafter, before, state, losses
