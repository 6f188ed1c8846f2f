#!/usr/bin/env bash
# jax 0.10.2 (0.12.0.1 does the same), jax.checkpoint of a function that writes to a jax.new_ref.
# Guess: an error. The guide to refs names such functions among what cannot be done, next to rules that do raise an
#   error when they are broken.
# What happens: no error, and wrong numbers. The backward pass runs the writes a second time, and what it computes
#   again it computes from the ref's changed value, so the gradient belongs to another function than the loss. The
#   policy decides which mistake is made: in a scan over four layers, a counter counts one layer with
#   everything_saveable and eight with policies that save less, and gradients are wrong in two ways. The value of the
#   loss is right in all cases.
# Why it matters: refs are offered for metrics and running scales, and layers of a model are checkpointed. Activations
#   are counted twice and a scale (as of float8 training) spoils gradients, while the loss shows nothing. A ref made
#   with kind="no_grad_no_remat" gives right numbers in both.
# Output seen: gradient 1.3818 without checkpoint, 0.0770 with it, 1.9221 with everything_saveable; layers counted 4,
#   8, 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp

LAYERS = 4
saveable = jax.checkpoint_policies.everything_saveable


def numbers(wrap, kind):
    """Loss and gradient of a function with a running scale, and the layers that a counter sees in a training step."""
    scale = jax.new_ref(jnp.ones(()), kind=kind)

    def scaled(x):
        old = scale[...]
        scale[...] = old + 1.0
        return x * jnp.sin(x * old)

    loss, gradient = jax.jit(jax.value_and_grad(wrap(scaled)))(1.0)
    layers = jax.new_ref(jnp.zeros((), jnp.int32), kind=kind)

    def network(weights, x):
        def layer(x, weight):
            layers[...] += 1
            return jnp.tanh(x @ weight), None

        return jax.lax.scan(wrap(layer), x, weights)[0].sum()

    jax.jit(jax.grad(network))(jnp.ones((LAYERS, 3, 3)), jnp.ones((2, 3)))
    return round(float(loss), 4), round(float(gradient), 4), int(layers[...])


wraps = {
    "no checkpoint": lambda function: function,
    "checkpoint": jax.checkpoint,
    "everything_saveable": lambda function: jax.checkpoint(function, policy=saveable),
}
right = (0.8415, 1.3818, LAYERS)  # sin 1, and sin 1 + cos 1
for name, wrap in wraps.items():
    seen = {kind: numbers(wrap, kind) for kind in (None, "no_grad_no_remat")}
    for kind, (loss, gradient, layers) in seen.items():
        print(f"{name}, kind {kind}: loss {loss}, gradient {gradient}, layers counted {layers}")
    assert seen["no_grad_no_remat"] == right
    if wrap is wraps["no checkpoint"]:
        assert seen[None] == right
    else:
        loss, gradient, layers = seen[None]
        assert loss == right[0]
        assert gradient != right[1] and layers != right[2], "checkpoint now leaves refs as they are without it"
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
