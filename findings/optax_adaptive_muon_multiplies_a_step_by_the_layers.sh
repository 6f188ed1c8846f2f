#!/usr/bin/env bash
# optax 0.2.8 with jax 0.10.2, optax.contrib.muon with adaptive=True and muon_weight_dimension_numbers.
# Guess: weights of n layers in one array [n, inputs, outputs], with the first axis as the batch axis, get the updates
#   that the n matrices get one by one. The text of MuonDimensionNumbers says that such axes are independent.
# What happens: that is so with adaptive=False. With adaptive=True each matrix is multiplied by the dual norm of the
#   gradient, and this norm is summed over the whole array. So the update of each layer has the sum of all layers as its
#   factor: it is about n times too large, and it changes when another layer's gradient does.
# Why it matters: models whose layers are scanned have all weights in such arrays. The same learning rate is then n
#   times as high as in the unscanned model, and a rate that is found with few layers is too high with many. With the
#   norms of the layers unequal, a layer with a small gradient gets the step of a large one. Divide the learning rate by
#   n only if all layers have equal norms; else keep adaptive off, or give muon the matrices one by one.
# Output seen: update of stacked layers through that of single ones, adaptive off: 1.00; on, with equal norms: 2 layers
#   2.00, 8 layers 8.00, 32 layers 32.00; with norms of 1 and 100, the first layer 101.00, the second 1.01; one matrix
#   with two output axes 1.00.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "optax==0.2.8" "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

INPUTS, OUTPUTS = 16, 24


def update(gradients, adaptive, axes=None):
    optimizer = optax.contrib.muon(1.0, adaptive=adaptive, muon_weight_dimension_numbers=axes)
    weights = jax.tree.map(jnp.zeros_like, gradients)
    return optimizer.update(gradients, optimizer.init(weights), weights)[0]


def ratios(norms, adaptive):
    """Norms of the updates of stacked layers, divided by those of the same layers one by one."""
    gradients = jax.random.normal(jax.random.key(0), (INPUTS, OUTPUTS)) * jnp.array(norms)[:, None, None]
    stacked = update([gradients], adaptive, [MuonDimensionNumbers(1, 2)])[0]
    single = jnp.stack(update(list(gradients), adaptive))
    norms_stacked, norms_single = (jnp.linalg.norm(updates, axis=(1, 2)) for updates in (stacked, single))
    cosines = (stacked * single).sum((1, 2)) / norms_stacked / norms_single
    assert jnp.allclose(cosines, 1.0, atol=1e-4), "the control: the direction is right"
    return np.asarray(norms_stacked / norms_single)


for adaptive in (False, True):
    for norms in ([1.0], [1.0] * 2, [1.0] * 8, [1.0] * 32, [1.0, 100.0]):
        found = ratios(norms, adaptive)
        expected = sum(norms) / np.array(norms) if adaptive else np.ones(len(norms))
        print(f"adaptive {adaptive}, {len(norms)} layers, norms {norms[0]:.0f} to {norms[-1]:.0f}: ", end="")
        print(f"stacked through single, first {found[0]:.2f}, last {found[-1]:.2f}")
        assert np.allclose(found, expected, rtol=1e-3), "stacked layers now have other factors"
gradient = jax.random.normal(jax.random.key(1), (INPUTS, 4, OUTPUTS // 4))
heads = update([gradient], True, [MuonDimensionNumbers(0, (1, 2))])[0].reshape(INPUTS, OUTPUTS)
flat = update([gradient.reshape(INPUTS, OUTPUTS)], True)[0]
print(f"one matrix with two output axes: {float(jnp.linalg.norm(heads) / jnp.linalg.norm(flat)):.2f}")
assert jnp.allclose(heads, flat, rtol=1e-4, atol=1e-5)
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
