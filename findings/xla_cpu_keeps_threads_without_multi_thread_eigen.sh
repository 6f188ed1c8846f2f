#!/usr/bin/env bash
# jax 0.10.2, XLA's flag xla_cpu_multi_thread_eigen, on two or more cores.
# Guess: with the flag off, as XLA_FLAGS or as an option of compile(), a program for a CPU runs on one thread.
# What happens: nothing changes: the matrix products are divided between as many threads as before, in both ways to
#   set it. PJRT_NPROC=1 in the environment leaves one thread. jax 0.12.0.1 does the same.
# Why it matters: small models are faster on one thread, and measurements "on one thread" that set this flag, as many
#   scripts and answers advise, are measurements on all cores.
# Output seen: threads with more than a tenth of the ticks: default 2, option 2, flag 2, PJRT_NPROC=1 1.
set -euo pipefail
[ "$(nproc)" -gt 1 ] || { echo "needs two cores" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import os
import sys

import jax
import jax.numpy as jnp


def ticks():
    """CPU ticks of each thread of this process."""
    counts = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        counts[thread] = int(fields[11]) + int(fields[12])
    return counts


x = jnp.ones((1500, 1500)) / 1500
options = {"xla_cpu_multi_thread_eigen": False} if "option" in sys.argv else None
program = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, y: y @ x, x)).lower(x).compile(compiler_options=options)
program(x).block_until_ready()
before = ticks()
program(x).block_until_ready()
spent = [count - before.get(thread, 0) for thread, count in ticks().items()]
print(sum(10 * one > sum(spent) for one in spent))
PY
export JAX_PLATFORMS=cpu
unset XLA_FLAGS PJRT_NPROC NPROC
run() { "$folder/v/bin/python" "$folder/run.py" "$@"; }
default=$(run)
option=$(run option)
flag=$(XLA_FLAGS=--xla_cpu_multi_thread_eigen=false run)
one=$(PJRT_NPROC=1 run)
echo "threads with more than a tenth of the ticks: default $default, option $option, flag $flag, PJRT_NPROC=1 $one"
[ "$default" -gt 1 ] && [ "$option" = "$default" ] && [ "$flag" = "$default" ] && [ "$one" = 1 ]
