#!/usr/bin/env bash
# qwix 0.1.8 with jax 0.10.2 and flax 0.12.8 (jax 0.12.0.1 does the same), QtProvider: training with quantised values.
# Guess: a rule quantises the products of the modules that it names, and the model that was given stays a float model.
# What happens: that holds for nnx.Linear, jnp.einsum and lax.dot_general. `x @ w`, jnp.matmul and jnp.dot are traced
#   once for a shape, and jax keeps the trace. qwix replaces dot_general while a trace is made, and is not asked again.
#   So the first product of a shape decides for all products of the shape, in all layers and models of the process. A
#   rule for layer 0 quantises all layers, a rule for layers 1 and 2 quantises none. A float model that runs later gives
#   the quantised numbers; if it ran first, the quantised model gives the float numbers. No error and no warning.
# Why it matters: models of one's own use `x @ w`, and the layers of a model have equal shapes. The usual comparison of
#   a quantised model with the float one shows no loss at all, because both are the same program. get_unused_rules()
#   finds only a rule that is never asked. QtProvider(rules, disable_jit=True) is right in all cases.
# Output seen: quantised of three layers with `x @ w`, jnp.matmul or jnp.dot: rule for 0 all, rule for 1 and 2 none;
#   float model after a quantised one all; quantised after a float one none. With einsum, with dot_general, and with
#   disable_jit: as the rules say.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "qwix==0.1.8" "flax==0.12.8" "jax==0.10.2" \
    "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
import qwix
from flax import nnx

SIZE, ROWS = 16, 4


def dot_general(x, w):
    return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())))


products = {
    "x @ w": lambda x, w: x @ w,
    "jnp.matmul": lambda x, w: jnp.matmul(x, w),
    "jnp.dot": lambda x, w: jnp.dot(x, w),
    "jnp.einsum": lambda x, w: jnp.einsum("bi,io->bo", x, w),
    "lax.dot_general": dot_general,
}


class Layer(nnx.Module):
    def __init__(self, product, rngs):
        self.product, self.w = product, nnx.Param(jax.random.normal(rngs.params(), (SIZE, SIZE)) / 4)

    def __call__(self, x):
        return products[self.product](x, self.w[...])


class Model(nnx.Module):
    def __init__(self, product):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(product, rngs) for _ in range(3)])

    def __call__(self, x):
        """The outputs of all layers."""
        outputs = []
        for layer in self.layers:
            outputs.append(x := layer(x))
        return outputs


def quantised(model, x, path, disable_jit):
    # A range that is cut shows clearly which outputs are quantised.
    rule = qwix.QtRule(
        module_path=path,
        weight_qtype=jnp.int8,
        act_qtype=jnp.int8,
        weight_calibration_method="absmax,0.3",
        act_calibration_method="absmax,0.3",
    )
    return qwix.quantize_model(model, qwix.QtProvider([rule], disable_jit=disable_jit), x)


def layers_quantised(model, weights, x):
    """The numbers of the layers whose output is not the float product of their input."""
    found, outputs = [], nnx.jit(lambda model, x: model(x))(model, x)
    for number, (w, output) in enumerate(zip(weights, outputs)):
        if jnp.abs(output - dot_general(x, w)).max() > 1e-3:
            found.append(number)
        x = output
    return found


x = jax.random.normal(jax.random.key(1), (ROWS, SIZE))
everything, nothing = [0, 1, 2], []
for product, disable_jit in [(product, False) for product in products] + [("x @ w", True)]:
    model, seen = Model(product), {}
    weights = [layer.w[...] for layer in model.layers]
    for path, name in (("layers/0", "rule for 0"), ("layers/[12]", "rule for 1 and 2")):
        jax.clear_caches()  # as in a new process
        seen[name] = layers_quantised(quantised(model, x, path, disable_jit), weights, x)
    jax.clear_caches()
    assert layers_quantised(quantised(model, x, ".*", disable_jit), weights, x) == everything
    seen["float after it"] = layers_quantised(model, weights, x)
    jax.clear_caches()
    assert layers_quantised(model, weights, x) == nothing
    seen["quantised after float"] = layers_quantised(quantised(model, x, ".*", disable_jit), weights, x)
    print(f"{product}{', disable_jit' * disable_jit}: layers quantised {seen}")
    if disable_jit or product in ("jnp.einsum", "lax.dot_general"):
        assert list(seen.values()) == [[0], [1, 2], nothing, everything]
    else:
        assert list(seen.values()) == [everything, nothing, everything, nothing], "each layer now has its own rule"
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
