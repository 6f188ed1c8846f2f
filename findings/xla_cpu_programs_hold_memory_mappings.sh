#!/usr/bin/env bash
# jax 0.10.2, XLA's CPU compiler, Linux.
# Guess: a compiled program costs memory, so a process can hold as many programs as memory allows.
# What happens: a program holds two or three memory mappings for each kernel in it until it is dropped. Linux allows a
#   process 65,530 of them (vm.max_map_count), whatever memory is free. A model of 24 layers has several hundred.
# Why it matters: a long test run or a server that compiles a program per shape meets this limit after about a hundred
#   such programs, with gigabytes free, and the process then ends without a Python exception. Count mappings, not bytes,
#   and drop programs before the limit.
# Output seen: 4 kernels 14 or 15, 16 kernels 36 to 51, 64 kernels 144 to 195 mappings.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import pathlib

import jax
import jax.numpy as jnp


def mappings():
    return pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")


def program(kernels):
    def f(x):
        for index in range(kernels):
            x = jnp.sort(jnp.tanh(x @ x + index), axis=index % 2)
        return x

    return jax.jit(f).lower(x).compile()


x = jnp.ones((64, 64))
program(1)(x)  # the first program also brings mappings of the runtime
added = {}
for kernels in (4, 16, 64):
    before = mappings()
    one = program(kernels)
    one(x)
    added[kernels] = mappings() - before
    print(f"{kernels} kernels: {added[kernels]} mappings")
assert 64 < added[64], "a program of 64 kernels no longer holds more than a mapping a kernel"
assert added[4] < added[16] < added[64]
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
