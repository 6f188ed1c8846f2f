#!/usr/bin/env bash
# jax 0.10.2 with jax-cuda12-plugin, compiled for an H100. No GPU is needed; Linux on x86.
# Guess: the cost of jax.lax.top_k(x, k) grows slowly with k, and k = 20 costs about as much as k = 16.
# What happens: up to k = 16 it is one call of a kernel that keeps k values. From k = 17 on all of x is sorted with its
#   indices, which needs memory for both.
# Why it matters: a sampler over 151,936 tokens with top-k 20, the advice for Qwen3, sorts the vocabulary for every
#   token.
# Output seen: k = 8 and 16: a call of TopK, 0.0 MB of temporary memory; 17 and 20: a sort, 20.7 MB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" \
    "jax-cuda12-plugin==0.10.2" "jax-cuda12-pjrt==0.10.2"
cat >"$folder/run.py" <<'PY'
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
x = jax.ShapeDtypeStruct((17, 151_936), jnp.float32, sharding=place)
for k in (8, 16, 17, 20):
    program = jax.jit(lambda x, k=k: jax.lax.top_k(x, k)).lower(x).compile()
    text, size = program.as_text(), program.memory_analysis().temp_size_in_bytes / 1e6
    sorts = " sort(" in text
    print(f"k = {k}: {'a sort' if sorts else 'no sort'}, {size:.1f} MB of temporary memory")
    assert sorts == (k > 16) and ("TopK" in text) == (k <= 16), "the limit of the kernel is no longer 16"
    assert (size > 10) == sorts
PY
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$folder/v/bin/python" "$folder/run.py"
