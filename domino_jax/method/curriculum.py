"""Weights in the loss that change over the run: Domino's share λ of the base loss, and DFlash2's α of the selector."""

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


def selector_alpha(
    step: jax.Array, total_steps: int, alpha: float, warmup_ratio: float, ramp_ratio: float
) -> jax.Array:
    """α(s) = α · clip((s - ⌊wT⌋) / max(1, ⌊rT⌋), 0, 1), float32; without a ramp α from step ⌊wT⌋ on.

    Args:
        step: completed optimizer steps, 0-based.  total_steps: T.
        warmup_ratio: w, the share of the run in which only the backbone's logits are trained.
        ramp_ratio: r, the share over which α then rises.

    >>> T = 1000, α 1, w .1, r .2: s = 99, 100, 200, 300 → 0, 0, .5, 1    w .1, r 0: s = 99, 100 → 0, 1
    """
    since = jnp.asarray(step, jnp.float32) - int(warmup_ratio * total_steps)
    if ramp_ratio == 0.0:
        return jnp.where(since >= 0, alpha, 0.0)
    return alpha * jnp.clip(since / max(1, int(ramp_ratio * total_steps)), 0.0, 1.0)
