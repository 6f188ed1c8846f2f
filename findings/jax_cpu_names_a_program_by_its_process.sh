#!/usr/bin/env bash
# jax 0.10.2, the persistent compilation cache, two processes of one run on CPUs.
# Guess: process 0 alone writes the cache, as jax says, and at the next start both processes find the program there.
# What happens: process 0 finds it. Process 1 never does: the key of a program has the fingerprint of the topology, which
#   on CPUs holds the devices of the asking process alone. So every start compiles all programs in every other process.
# Why it matters: a shared cache folder, right for TPUs and GPUs, does nothing for a cluster of CPUs.
# Output seen: programs found at the second start: process 0 1 of 1, process 1 0 of 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2"
cat >"$folder/run.py" <<'PY'
import collections
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
rows = NamedSharding(mesh, PartitionSpec("x"))
x = jax.make_array_from_callback((16, 8), rows, lambda index: np.ones((8, 8), "float32"))
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.split("/")[-1]]))
whole = NamedSharding(mesh, PartitionSpec())
jax.jit(lambda x: (jnp.sin(x) @ x.T).sum(), out_shardings=whole)(x).block_until_ready()
print(f"process {rank} {counts['cache_hits']} of {counts['compile_requests_use_cache']}")
PY
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR="$folder/cache" JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
unset JAX_NUM_CPU_DEVICES
start() {
  port=$("$folder/v/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  "$folder/v/bin/python" "$folder/run.py" 0 "$port" >"$folder/0" 2>/dev/null &
  "$folder/v/bin/python" "$folder/run.py" 1 "$port" >"$folder/1" 2>/dev/null
  wait
}
start
start
first=$(grep ^process "$folder/0")
second=$(grep ^process "$folder/1")
echo "programs found at the second start: $first, $second"
[ "$first" = "process 0 1 of 1" ] && [ "$second" = "process 1 0 of 1" ]
