#!/usr/bin/env bash
# jax 0.10.2 with jax-cuda12-plugin, compiled for an H100. No GPU is needed; Linux on x86.
# Guess: jax.lax.ragged_dot, made for mixtures of experts, reads the matrices of the groups that have rows.
# What happens: for a GPU it becomes a dense product. All rows are copied for each group, with zeros where they belong
#   to another one, and multiplied with every group's matrix, and the results of all groups are added. The copies of 8
#   rows over 128 groups are [128, 8, 2048], and every matrix is read. No warning says so.
# Why it matters: a decoding step of a mixture with 8 of 128 experts reads 16 times the bytes that it needs, and a
#   result [groups, outputs, rows] is kept in memory, which for a prefill of thousands of rows is gigabytes.
# Output seen: one product of shape [128, 768, 8] and no other call; 7.3 MB of temporary memory.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" \
    "jax-cuda12-plugin==0.10.2" "jax-cuda12-pjrt==0.10.2"
cat >"$folder/run.py" <<'PY'
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 85000000000
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 5 }
device_description_str: "NVIDIA H100"
"""
gpus = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x1").devices
place = jax.sharding.SingleDeviceSharding(gpus[0])
GROUPS, INPUTS, OUTPUTS, ROWS = 128, 2048, 768, 8
shapes = ((ROWS, INPUTS), jnp.bfloat16), ((GROUPS, INPUTS, OUTPUTS), jnp.bfloat16), ((GROUPS,), jnp.int32)
arguments = [jax.ShapeDtypeStruct(shape, kind, sharding=place) for shape, kind in shapes]
program = jax.jit(jax.lax.ragged_dot).lower(*arguments).compile()
products = re.findall(r"= \w+\[([\d,]*)\]\S* dot\(", program.as_text())
size = program.memory_analysis().temp_size_in_bytes / 1e6
print(f"products of shape {products}, {size:.1f} MB of temporary memory")
assert len(products) == 1 and sorted(map(int, products[0].split(","))) == sorted((GROUPS, OUTPUTS, ROWS))
assert "custom-call" not in program.as_text()
PY
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$folder/v/bin/python" "$folder/run.py"
