#!/usr/bin/env bash
# flax 0.12.8 and jax 0.10.2, weights that are made in bfloat16 (param_dtype, or the dtype of jax.random.normal).
# Guess: an initializer asked for bfloat16 gives its float32 numbers, rounded: mean 0, as many values as bfloat16 has.
# What happens: the uniform numbers that it starts from have seven bits. A matrix holds 128 different numbers, the
#   ends of a normal distribution are -2.9 and 2.5, and the mean is 0.011 to 0.018 standard deviations below 0, the
#   same way in every matrix. A sum over thousands of inputs multiplies that.
# Why it matters: after an activation whose outputs are positive, all outputs of a new layer are shifted by about
#   their own standard deviation, and the standard deviations are right. Make weights in float32 and convert them.
# Output seen: 128 values; outputs of a layer of 4,096 positive inputs: made in bfloat16 mean -0.88, standard
#   deviation 1.00; made in float32 and converted -0.03 and 1.01.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" "flax==0.12.8"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
from flax import linen as nn

key = jax.random.key(0)
normal = jax.random.normal(key, (1024, 1024), jnp.bfloat16)
print(f"jax.random.normal: {len(jnp.unique(normal))} values from {normal.min()} to {normal.max()}")
assert len(jnp.unique(normal)) == 128, "bfloat16 numbers are now made from more bits"

x = jnp.abs(jax.random.normal(jax.random.key(1), (16, 4096)))
x = x / jnp.sqrt((x**2).mean())
means = {}
for made_in in (jnp.bfloat16, jnp.float32):
    layer = nn.Dense(2048, use_bias=False, param_dtype=made_in)
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), layer.init(key, x))
    y = nn.Dense(2048, use_bias=False).apply(weights, x)
    means[made_in.__name__] = float(y.mean() / y.std())
    print(f"made in {made_in.__name__}: outputs have mean {y.mean():.2f}, standard deviation {y.std():.2f}")
assert abs(means["float32"]) < 0.05
assert means["bfloat16"] < -0.5, "weights made in bfloat16 now have mean 0"
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
