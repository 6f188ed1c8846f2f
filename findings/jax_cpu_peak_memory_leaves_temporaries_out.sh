#!/usr/bin/env bash
# jax 0.10.2, Compiled.memory_analysis() of a program for a CPU.
# Guess: peak_memory_in_bytes is at least what the program's arguments and temporaries need together, as it is for TPUs.
# What happens: on a CPU it is arguments and results alone. A program with 8.4 MB of temporaries and 4.2 MB of arguments
#   states a peak of 4.2 MB.
# Why it matters: a memory budget that is tested on a CPU with this field passes whatever the temporaries are. Add
#   temp_size_in_bytes there.
# Output seen: arguments 4194304, temporaries 8388608, peak 4194340.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp


def f(x):
    a = jnp.sort(x @ x, axis=0)
    b = jnp.sort(a @ a, axis=1)
    return (b @ b).sum()


memory = jax.jit(f).lower(jax.ShapeDtypeStruct((1024, 1024), jnp.float32)).compile().memory_analysis()
arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
print(f"arguments {arguments}, temporaries {temporaries}, peak {memory.peak_memory_in_bytes}")
assert temporaries >= 1024 * 1024 * 4
assert memory.peak_memory_in_bytes < arguments + temporaries, "the peak now counts temporaries"
PY
JAX_PLATFORMS=cpu "$folder/v/bin/python" "$folder/run.py"
