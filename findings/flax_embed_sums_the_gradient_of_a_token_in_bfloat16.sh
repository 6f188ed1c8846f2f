#!/usr/bin/env bash
# flax 0.12.8 with jax 0.10.2, flax.linen.Embed with dtype=bfloat16 and its float32 parameter.
# Guess: as with nn.Dense, only values are rounded to bfloat16. Sums are made in float32, and the float32 gradient is
#   right to a percent.
# What happens: Embed casts the whole table and reads rows of the copy, so the transpose adds a token's rows of
#   gradient one by one in bfloat16, and casts the sum to float32. A token that occurs 8,192 times with a gradient of
#   one each gets 256. Compiled once, programs for an H100 and a TPU v5e add in bfloat16 too. nn.Dense of
#   one-hot rows with the same dtype gets 8,192.
# Why it matters: newlines, "the", padding and the rows of small tables (positions, types, experts) occur thousands of
#   times in a batch, and train with too small a gradient. It is float32 when the optimizer gets it, so no check of
#   dtypes shows it. Read rows of a float32 Embed and cast the rows.
# Output seen: gradient of Embed 256, of rows that are cast after the read 8192, of Dense 8192; with noise, where
#   698.6 is right, 548.0 and 698.8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "flax==0.12.8" "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

TOKENS, WIDTH, TIMES, TOKEN = 64, 16, 8192, 5


def embed(table, ids):
    """Embed in bfloat16."""
    return nn.Embed(TOKENS, WIDTH, dtype=jnp.bfloat16).apply({"params": {"embedding": table}}, ids)


def rows_cast(table, ids):
    """Embed in float32, rows cast to bfloat16."""
    return nn.Embed(TOKENS, WIDTH, dtype=jnp.float32).apply({"params": {"embedding": table}}, ids).astype(jnp.bfloat16)


def dense(table, ids):
    """Dense in bfloat16, of one-hot rows."""
    layer = nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16)
    return layer.apply({"params": {"kernel": table}}, jax.nn.one_hot(ids, TOKENS))


def gradient(read, upstream):
    """The first number of the token's row of gradient."""

    def loss(table, ids, upstream):
        return (read(table, ids).astype(jnp.float32) * upstream).sum()

    table = jax.jit(jax.grad(loss))(jnp.zeros((TOKENS, WIDTH)), jnp.full(TIMES, TOKEN), upstream)
    assert table.dtype == jnp.float32
    return float(table[TOKEN, 0])


noise = np.random.default_rng(0).normal(0.1, 1.0, (TIMES, WIDTH)).astype(np.float32)
for name, upstream in (("ones", np.ones_like(noise)), ("noise", noise)):
    right = float(upstream[:, 0].sum(dtype=np.float64))
    print(f"{name}: {right:.1f} is right")
    for read in (embed, rows_cast, dense):
        seen = gradient(read, upstream)
        print(f"  {read.__doc__} {seen:.1f}")
        if read is embed:
            assert seen < 0.9 * right, "Embed now adds up gradients in more than bfloat16"
        else:
            assert abs(seen / right - 1) < 0.01
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
