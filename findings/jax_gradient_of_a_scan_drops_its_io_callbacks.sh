#!/usr/bin/env bash
# jax 0.10.2 (0.12.0.1 does the same), jax.experimental.io_callback without results in the body of jax.lax.scan.
# Guess: four iterations make four calls, whether or not the scan is differentiated. The guide to callbacks says of
#   io_callback, alone among the three, that execution is guaranteed, and that it works in scan and under grad if it
#   gets no differentiated value.
# What happens: with jax.grad, value_and_grad, vjp or linearize of a function with such a scan, none of the four calls
#   is made. If the callback's argument does not depend on the loop, one call is made instead of four. The callback is
#   made without a scan, and with a scan that is not differentiated; jvp makes all four. No error, no warning.
# Why it matters: layers and microbatches are scanned, and what they log to the host (metrics, routed tokens, data for
#   an evaluation) is there in the evaluation step and is missing in the training step. jax.debug.callback with an
#   argument that depends on the loop makes all calls; or return the values from the scan and call back after it.
# Output seen: calls of the loss 4, of its jvp 4, of its value and gradient 0; 1 with a constant; 4 of
#   jax.debug.callback.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
from jax.experimental import io_callback

LAYERS = 4
seen = []


def through_io(value):
    io_callback(seen.append, None, value)


def through_debug(value):
    jax.debug.callback(seen.append, value)


def scanned(report, constant=False):
    """A network of scanned layers that report a number each."""

    def layer(x, _):
        report(jnp.float32(1) if constant else jax.lax.stop_gradient(x))
        return jnp.sin(x), None

    return lambda x: jax.lax.scan(layer, x, length=LAYERS)[0]


def calls(function):
    """How many reports a compiled call makes."""
    seen.clear()
    jax.block_until_ready(jax.jit(function)(1.0))
    jax.effects_barrier()
    return len(seen)


def single(x):
    through_io(jax.lax.stop_gradient(x))
    return jnp.sin(x)


def tangent(function):
    return lambda x: jax.jvp(function, (x,), (1.0,))


io, constant, debug = scanned(through_io), scanned(through_io, constant=True), scanned(through_debug)
counts = {
    "one layer": (calls(single), calls(jax.value_and_grad(single))),
    "scanned": (calls(io), calls(jax.value_and_grad(io))),
    "scanned, constant": (calls(constant), calls(jax.value_and_grad(constant))),
    "scanned, jax.debug.callback": (calls(debug), calls(jax.value_and_grad(debug))),
}
for name, (loss, gradient) in counts.items():
    print(f"{name}: calls of the loss {loss}, of its value and gradient {gradient}")
print("scanned: calls of its jvp", calls(tangent(io)))
assert counts["one layer"] == (1, 1)
assert counts["scanned, jax.debug.callback"] == (LAYERS, LAYERS)
assert calls(tangent(io)) == LAYERS
assert counts["scanned"][0] == counts["scanned, constant"][0] == LAYERS
assert counts["scanned"][1] < LAYERS and counts["scanned, constant"][1] < LAYERS, "all calls are now made"
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
