#!/usr/bin/env bash
# qwix 0.1.8 with jax 0.10.2 and flax 0.12.8 (jax 0.12.0.1 does the same), quantize and the rules with "nvfp4".
# Guess: the relative error of nvfp4 is that of four bits, near 10 percent, and it does not depend on the unit of the
#   weights: NVFP4 has a float8 scale for 16 numbers, and a float32 scale for the tensor that brings these into range.
# What happens: there is no scale for the tensor. A block's scale, its largest number divided by 6, is rounded to
#   float8_e4m3fn, whose lowest number is 2**-9. A block whose largest number is below 0.0059 gets a scale of 0 and
#   becomes zeros. Up to 0.094 the scale has less than its four bits. Above 2,688 numbers are cut. The scale is stored
#   as float32, so its dtype does not show this, and no warning is given.
# Why it matters: weights of a standard deviation of 0.02 are already on the edge, and projections into the residual
#   stream often start smaller by the square root of twice the layers: at 0.0025 with 32 layers, where most weights
#   become zero. Small activations vanish too. mxfp4 and int4 have the same error at any size, and a test with random
#   numbers of deviation 1 shows that of nvfp4 as no larger. Multiply the weights so that the largest is 2,688, and
#   divide after the product.
# Output seen: error and share of zeros, nvfp4: deviation 1 9.5%, 7%; 0.02 10.3%, 7%; 0.005 13.7%, 9%; 0.0025 80.5%,
#   77%; 0.001 100.0%, 100%; 3000 43.7%, 3%. At all of them mxfp4 11.5% to 11.8%, int4 9.5%, multiplied nvfp4 9.5%.
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

LARGEST = 448 * 6  # of a float8_e4m3fn scale and a float4_e2m1fn number


def through(weights, kind, tile):
    quantised = qwix.quantize(weights, kind, channelwise_axes=(1,), tiled_axes={0: tile})
    return qwix.dequantize(quantised)


def multiplied(weights):
    factor = LARGEST / jnp.abs(weights).max()
    return through(weights * factor, "nvfp4", 16) / factor


ways = {
    "nvfp4": lambda weights: through(weights, "nvfp4", 16),
    "nvfp4, multiplied": multiplied,
    "mxfp4": lambda weights: through(weights, "mxfp4", 32),
    "int4": lambda weights: through(weights, jnp.int4, 32),
}
normal = jax.random.normal(jax.random.key(0), (256, 1024))
for deviation in (1.0, 0.02, 0.005, 0.0025, 0.001, 3000.0):
    weights, errors = normal * deviation, {}
    for name, way in ways.items():
        result = way(weights)
        error, zeros = jnp.linalg.norm(result - weights) / jnp.linalg.norm(weights), (result == 0).mean()
        errors[name] = float(error)
        print(f"deviation {deviation:g}, {name}: error {error:.1%}, zeros {zeros:.0%}")
        if name != "nvfp4":
            assert 0.08 < error < 0.13
    good = abs(errors["nvfp4"] - errors["nvfp4, multiplied"]) < 0.002
    assert good == (deviation == 1.0), "the error of nvfp4 now depends otherwise on the size of the weights"
    assert deviation > 0.0025 or errors["nvfp4"] > 0.7
small = qwix.quantize(normal * 0.001, "nvfp4", channelwise_axes=(1,), tiled_axes={0: 16})
print(f"scales of deviation 0.001: {small.scale.dtype}, largest {float(small.scale.max())}")
assert small.scale.max() == 0.0
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
