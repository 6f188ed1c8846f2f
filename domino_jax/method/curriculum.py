"""The weight in the loss that changes over the run: λ, the share of the base loss."""

import math

import jax
import jax.numpy as jnp


def lambda_base(step: jax.Array, total_steps: int, start: float, decay_ratio: float) -> jax.Array:
    """λ(s) = clip(start · (1 - min(s / max(1, ⌊ρT⌋), 1)), 0, 1), float32.

    Args:
        step: completed optimizer steps, 0-based.  total_steps: T.
        start: λ at step 0.  decay_ratio: ρ, the share of the run over which λ falls to 0 (1.0 in the paper's recipes);
            infinity keeps it at `start`.

    >>> T = 1000, start 1, ρ 1: s = 0, 250, 999 → 1, .75, .001
    """
    span = decay_ratio if math.isinf(decay_ratio) else max(1, int(decay_ratio * total_steps))
    fraction = jnp.minimum(jnp.asarray(step, jnp.float32) / span, 1.0)
    return jnp.clip(start * (1.0 - fraction), 0.0, 1.0)
