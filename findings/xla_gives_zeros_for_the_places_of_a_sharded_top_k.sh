#!/usr/bin/env bash
# jax 0.10.2 with jax-cuda12-plugin, compiled for eight H100s. No GPU is needed; Linux on x86.
# Guess: jax.jit(lambda x: jax.lax.top_k(x, 8)) gives the same indices whether x is on one GPU or divided between
#   eight.
# What happens: where the indices are a result of the program as they come, the compiler takes them for unused and
#   puts zeros in their place. The values are right. It is so with x divided by rows and along the sorted axis, and
#   for approx_max_k. A program of the indices alone is a constant that does not read x. With one operation on the
#   indices, or a third result of the program, they are computed. libtpu 0.0.42.1 did the same with top_k, tried once.
# Why it matters: the candidates of a sampler, or a router's experts, are all number 0, and no error says so. A test
#   on one GPU, or on a mesh of CPU devices, passes.
# Output seen: which results depend on x: top_k by rows values yes, indices no; along the axis yes, no; approx_max_k
#   yes, no; indices + 1 yes, yes; with a sum as third result all. On eight CPU devices the indices are those of a
#   sort.
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
gpus = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x8").devices


def results_that_read_x(function, spec):
    """For each result of the program for eight GPUs: is it computed from the program's argument?"""
    mesh = jax.sharding.Mesh(gpus, "d")
    x = jax.ShapeDtypeStruct((16, 4096), jnp.float32, sharding=NamedSharding(mesh, spec))
    text = jax.jit(function).lower(x).compile().as_text()
    entry = text[text.index("\nENTRY") :].split("\n}")[0]
    operands, root = {}, None
    for line in entry.splitlines():
        if found := re.match(r"\s*(ROOT )?%(\S+) = .*? ([\w-]+)\(([^()]*)\)", line):
            operands[found[2]] = ["x"] if found[3] == "parameter" else re.findall(r"%([\w.-]+)", found[4])
            root = (found[2], found[3]) if found[1] else root

    def reads(name):
        return name == "x" or any(reads(each) for each in operands[name])

    results = operands[root[0]] if root[1] == "tuple" else [root[0]]
    return [reads(name) for name in results]


def top_k(x):
    return jax.lax.top_k(x, 8)


def indices_alone(x):
    return jax.lax.top_k(x, 8)[1]


def approx_max_k(x):
    return jax.lax.approx_max_k(x, 8)


def indices_plus_1(x):
    values, indices = jax.lax.top_k(x, 8)
    return values, indices + 1


def three_results(x):
    return *jax.lax.top_k(x, 8), x.sum()


rows, axis = P("d", None), P(None, "d")
for function, spec, expected in (
    (top_k, rows, [True, False]),
    (top_k, axis, [True, False]),
    (indices_alone, rows, [False]),
    (approx_max_k, rows, [True, False]),
    (indices_plus_1, rows, [True, True]),
    (three_results, rows, [True, True, True]),
):
    seen = results_that_read_x(function, spec)
    print(f"{function.__name__} of x divided as {spec}: results that depend on x {seen}")
    assert seen == expected, f"expected {expected}"

x = jax.random.normal(jax.random.key(0), (16, 4096))
cpus = jax.sharding.Mesh(jax.devices("cpu"), "d")
assert cpus.size == 8
indices = jax.jit(indices_alone)(jax.device_put(x, NamedSharding(cpus, rows)))
assert (indices == jnp.argsort(-x, axis=1)[:, :8]).all()
PY
JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 TF_CPP_MIN_LOG_LEVEL=3 \
    "$folder/v/bin/python" "$folder/run.py"
