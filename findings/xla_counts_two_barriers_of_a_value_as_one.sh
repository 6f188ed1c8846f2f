#!/usr/bin/env bash
# jax 0.10.2 with jax-cuda12-plugin, compiled for an H100. No GPU is needed; Linux on x86.
# Guess: two calls of jax.lax.optimization_barrier(x) give two values that XLA has to take for different ones, so
#   products of the one and of the other are not joined.
# What happens: the two barriers become one, and the products of the same rows are joined into one product of a
#   concatenated matrix, as without barriers. Both are still in the program that JAX hands to XLA. A barrier of the
#   first barrier's result is kept, and so are the two products.
# Why it matters: fences between products, or around a value that shall be computed twice, do nothing where they fence
#   the same value, and no error or count of barriers in the lowered program shows it. Chain them.
# Output seen: products without barriers 1, with two barriers 1, with chained barriers 2.
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
barrier = jax.lax.optimization_barrier


def bare(x, a, b):
    return x @ a, x @ b


def two(x, a, b):
    return barrier(x) @ a, barrier(x) @ b


def chained(x, a, b):
    first = barrier(x)
    return first @ a, barrier(first) @ b


def products(function):
    shapes = (17, 4096), (4096, 1024), (4096, 1024)
    lowered = jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes))
    assert lowered.as_text().count("optimization_barrier") == (0 if function is bare else 2)
    return lowered.compile().as_text().count(" dot(")


counts = {function.__name__: products(function) for function in (bare, two, chained)}
print("products:", counts)
assert counts["bare"] == 1, "XLA no longer joins products of the same rows"
assert counts["two"] == 1, "two barriers of a value now keep its products apart"
assert counts["chained"] == 2
PY
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$folder/v/bin/python" "$folder/run.py"
