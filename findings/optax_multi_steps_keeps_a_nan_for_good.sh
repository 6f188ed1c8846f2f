#!/usr/bin/env bash
# optax 0.2.8 with jax 0.10.2, optax.MultiSteps around an optimizer that is made robust with apply_if_finite or
#   zero_nans.
# Guess: the accumulated gradients are zero again after each step, as the class says. A NaN in one microbatch costs one
#   step: apply_if_finite skips it, and the next step is a normal one.
# What happens: MultiSteps clears the sum by a multiplication with zero, and zero times NaN is NaN. The sums of all
#   later steps hold the NaN. apply_if_finite refuses each of them, and when max_consecutive_errors is exceeded it
#   lets the NaN through. With zero_nans, the weight gets a gradient of zero in each later step.
# Why it matters: one bad microbatch ends the training of the weight, and often of the whole model. The loss stays
#   finite and flat for a while, or even falls with zero_nans, and weights become NaN far from the batch that was bad.
#   A restart does not help, since the sum is saved with the state. Check gradients before they are added: put
#   apply_if_finite around MultiSteps, or use should_skip_update_fn=optax.skip_not_finite.
# Output seen: of 20 steps with a NaN in the second one, apply_if_finite within MultiSteps makes 1, and the weights are
#   NaN in the end if 5 errors are allowed; zero_nans trains one weight in 1 step and the other in 20. With the check
#   before the sum 20 steps are made, and without MultiSteps 19.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "optax==0.2.8" "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS, MICROBATCHES, BAD = 20, 4, 5
clipped = optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(0.1))


def several(optimizer, skip=None):
    return optax.MultiSteps(optimizer, MICROBATCHES, should_skip_update_fn=skip)


def guarded(optimizer, errors=1000):
    return optax.apply_if_finite(optimizer, errors)


def steps_made(optimizer, microbatches, bad):
    """In how many steps each of two weights changes, and the weights, if one gradient of the first weight is bad."""

    @jax.jit
    def train(weights, state, gradient):
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state

    weights = jnp.zeros(2)
    state, made = optimizer.init(weights), np.zeros(2, int)
    for microbatch in range(microbatches):
        before = weights
        weights, state = train(weights, state, jnp.array([bad if microbatch == BAD else 1.0, 1.0]))
        made += np.asarray((weights != before) & jnp.isfinite(weights))
    return made.tolist(), [round(weight, 2) for weight in weights.tolist()]


# Where a bad microbatch is left out, one more takes its place.
all_steps = STEPS * MICROBATCHES
cases = {
    "apply_if_finite, no MultiSteps": (guarded(clipped), STEPS, [STEPS - 1] * 2),
    "apply_if_finite around MultiSteps": (guarded(several(clipped)), all_steps + 1, [STEPS] * 2),
    "MultiSteps with skip_not_finite": (several(clipped, optax.skip_not_finite), all_steps + 1, [STEPS] * 2),
    "MultiSteps of apply_if_finite(1000)": (several(guarded(clipped)), all_steps, [1, 1]),
    "MultiSteps of apply_if_finite(5)": (several(guarded(clipped, 5)), all_steps, [1, 1]),
    "MultiSteps of zero_nans": (several(optax.chain(optax.zero_nans(), clipped)), all_steps, [1, STEPS]),
}
for bad in (1.0, math.nan):
    print(f"one gradient of {bad}: steps made by two weights, and the weights")
    for name, (optimizer, microbatches, expected) in cases.items():
        made, weights = steps_made(optimizer, microbatches, bad)
        print(f"  {name}: {made} {weights}")
        if bad == 1.0:
            assert made == [STEPS] * 2
        else:
            assert made == expected, "a NaN now costs another number of steps"
            assert any(map(math.isnan, weights)) == name.endswith("(5)")
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
