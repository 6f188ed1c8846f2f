#!/usr/bin/env bash
# jax 0.10.2, XLA's CPU compiler, products of bfloat16 matrices, on a Xeon with instructions for them (AMX).
# Guess: x @ w in bfloat16 reads w as it is stored, and with preferred_element_type=float32 it needs the same or more.
# What happens: with a bfloat16 result every matrix is converted to float32 in memory first, and in a program of many
#   products all copies are there at the same time; in a loop they are made before it. With a float32 result there are
#   no copies: the product goes to a library that reads bfloat16. So jnp.dot(x, w, preferred_element_type=float32),
#   rounded to bfloat16 afterwards, is the same product from a third of the memory. In a scan over stacked layers both
#   forms have a float32 copy of the whole stack.
# Why it matters: a bfloat16 model on a CPU needs three times the bytes of its weights, 48 GB instead of 16 for one of
#   8B, and writes them at every call. Nothing in the lowered program shows it.
# Output seen: 16 matrices of 33.6 MB together, temporary memory: bfloat16 results 67.2 MB, in a loop 67.2 MB; float32
#   results, rounded, 0.0 MB and 0.0 MB; a scan with float32 results 69.2 MB.
set -euo pipefail
grep -q amx_bf16 /proc/cpuinfo || { echo "this needs a CPU with AMX"; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import functools

import jax
import jax.numpy as jnp

LAYERS, WIDTH = 16, 1024


def plain(x, w):
    return jnp.tanh(x @ w)


def by_float32(x, w):
    return jnp.tanh(jnp.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16))


def once(layer, x, matrices):
    return functools.reduce(layer, matrices, x)


def looped(layer, x, matrices):
    return jax.lax.fori_loop(0, 8, lambda _, x: once(layer, x, matrices), x)


def scanned(layer, x, stack):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, stack)[0]


x = jax.random.normal(jax.random.key(0), (8, WIDTH), jnp.float32).astype(jnp.bfloat16)
stack = (jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)) * WIDTH**-0.5).astype(jnp.bfloat16)
megabytes, results = {}, {}
for program, weights in ((once, list(stack)), (looped, list(stack)), (scanned, stack)):
    for layer in (plain, by_float32):
        compiled = jax.jit(functools.partial(program, layer)).lower(x, weights).compile()
        case = program.__name__, layer.__name__
        megabytes[case] = compiled.memory_analysis().temp_size_in_bytes / 1e6
        results[case] = compiled(x, weights).astype(jnp.float32)
        print(*case, f"{megabytes[case]:.1f} MB of temporary memory, weights {stack.nbytes / 1e6:.1f} MB")
difference = jnp.abs(results["once", "plain"] - results["once", "by_float32"]).max()
print(f"largest difference of the results {difference:.4f}")
assert difference < 0.05
for program in ("once", "looped"):
    assert megabytes[program, "by_float32"] < 1
    assert megabytes[program, "plain"] >= 2 * stack.nbytes / 1e6, "matrices are now read as bfloat16"
assert megabytes["scanned", "by_float32"] >= 2 * stack.nbytes / 1e6, "a scan now reads its matrices as bfloat16"
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
