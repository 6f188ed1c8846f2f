#!/usr/bin/env bash
# optax 0.2.8 with jax 0.10.2, optax.contrib.schedule_free over a tree of float32 weights with one bfloat16 leaf.
# Guess: the bfloat16 leaf is rounded, and the float32 weights are averaged as without it: after n steps of the same
#   learning rate, the weights for the evaluation are the mean of n.
# What happens: the sum of the weights of the average is one number for the whole tree, and it gets the lowest dtype of
#   the tree. In bfloat16, 256 + 1 is 256, so the sum stops after 256 steps of the same learning rate. From then on each
#   step counts for 1/256 in all leaves: float32 weights become a mean of the last steps too. state_dtype=float32 does
#   not change that.
# Why it matters: the method is used for this mean. One leaf in bfloat16 (a frozen embedding, a bias), or a whole model
#   in it, takes most of the gain away, while the training loss and the dtypes of the weights look right. Keep every
#   leaf of the tree in float32.
# Output seen: after 8,000 steps, the sum is that of 8000 steps in float32, and of 256 with a bfloat16 leaf that is zero
#   and stays zero, or with all leaves in bfloat16. The error of the evaluated float32 weights is 0.025 and 0.122; that
#   of the last step, without a mean, 0.828 and 0.782.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "optax==0.2.8" "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
import optax

STEPS, RATE, WEIGHTS = 8000, 0.125, 256
noise = jax.random.normal(jax.random.key(0), (STEPS, WEIGHTS))


@jax.jit
def trained(params):
    """Steps that the sum holds, and errors of the evaluated and of the last weights. Zero is right."""
    optimizer = optax.contrib.schedule_free(optax.sgd(RATE), RATE, b1=0.9, state_dtype=jnp.float32)

    def step(carry, noise):
        params, state = carry
        weights = params["weights"]
        gradients = {"bias": jnp.zeros_like(params["bias"]), "weights": (weights + noise).astype(weights.dtype)}
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (params, optimizer.init(params)), noise)
    evaluated = optax.contrib.schedule_free_eval_params(state, params)["weights"]
    rms = [jnp.sqrt((weights**2).mean()) for weights in (evaluated, state.z["weights"])]
    return state.weight_sum / RATE**2, *rms


errors = []
for small, large in ((jnp.float32, jnp.float32), (jnp.bfloat16, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
    steps, error, last = map(float, trained({"bias": jnp.zeros(1, small), "weights": jnp.zeros(WEIGHTS, large)}))
    print(f"bias {small.__name__}, weights {large.__name__}: {steps:.0f} steps in the sum")
    print(f"  error of the evaluated weights {error:.3f}, of the last step {last:.3f}")
    assert steps == (STEPS if small == jnp.float32 else 256), "the sum is now kept in another dtype"
    errors.append(error)
assert errors[1] > 2 * errors[0]
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
