"""What a run carries from step to step: float32 master weights, optimizer moments, the step. Never the target."""

import flax.struct
import jax
import jax.numpy as jnp
import optax

from domino_jax.drafter.model import Drafter


@flax.struct.dataclass
class TrainState:
    """step: completed optimizer steps, int32.  params: float32 drafter parameters.  opt_state: optax state."""

    step: jax.Array
    params: dict
    opt_state: optax.OptState


def init_drafter_params(drafter: Drafter, key: jax.Array) -> dict:
    """Fresh float32 drafter parameters: normal(0, 0.02) linears, ones for norms, torch's uniform for the GRU."""
    c = drafter.config
    features = jnp.zeros((1, 2, len(c.target_layer_ids) * c.hidden_size))
    block = jnp.zeros((1, 1, c.block_size, c.hidden_size))
    return drafter.init(key, features, block, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), block)["params"]


def init_state(drafter: Drafter, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The state before the first step; pass it through jax.eval_shape for its shapes alone."""
    params = init_drafter_params(drafter, key)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
