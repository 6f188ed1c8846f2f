"""The state of a training run: float32 weights, moments and the step, never the target."""

import flax.struct
import jax
import jax.numpy as jnp
import optax

from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.drafters import AnyDrafter


@flax.struct.dataclass
class TrainState:
    """One array or tree per field; a checkpoint holds all of them.

    step: steps taken, int32, those left out included.  params: float32 drafter parameters.  opt_state: optax state.
    ema: float32 average of the parameters, an empty dict without one.
    skipped: int32, steps left out because a loss or gradient was not finite.  bad_step: int32, the last of them,
    counted from 1; 0 without one.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    ema: dict
    skipped: jax.Array
    bad_step: jax.Array

    @property
    def best_params(self) -> dict:
        """The parameters that are evaluated and exported: the average, if there is one."""
        return self.ema or self.params


def init_state(
    drafter: AnyDrafter, optimizer: optax.GradientTransformation, key: jax.Array, with_ema: bool = False
) -> TrainState:
    """The state before the first step; pass it through jax.eval_shape for its shapes alone."""
    params = init_drafter_params(drafter, key)
    zero = jnp.zeros((), jnp.int32)
    ema = jax.tree.map(jnp.copy, params) if with_ema else {}
    return TrainState(zero, params, optimizer.init(params), ema, zero, zero)
