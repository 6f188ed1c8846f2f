#!/usr/bin/env bash
# jax 0.10.2 with jax-cuda12-plugin, compiled for an H100. No GPU is needed; Linux on x86.
# Guess: jnp.where(flag, 4, 0) is an int32 in a Pallas kernel as anywhere, so fori_loop takes it as a bound.
# What happens: interpreted the kernel runs, compiled it is refused: "'scf.for' op failed to verify that all of
#   {lowerBound, upperBound, step} have same type". Written as (flag).astype(int32) * 4 the same number is accepted.
# Why it matters: a kernel over ragged rows has loops whose number of turns depends on data. Tests with the interpreter
#   on a CPU pass, and the message names a place in the compiler's program, not jnp.where.
# Output seen: by_where: JaxRuntimeError, "Failed to parse Triton module"; by_product: compiled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" \
    "jax-cuda12-plugin==0.10.2" "jax-cuda12-pjrt==0.10.2"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import triton

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


def add(turns, x_ref, out_ref):
    start = jnp.zeros(x_ref.shape, x_ref.dtype)
    out_ref[...] = jax.lax.fori_loop(0, turns, lambda _, total: total + x_ref[...], start)


def by_where(flag_ref, x_ref, out_ref):
    add(jnp.where(flag_ref[0] > 0, 4, 0), x_ref, out_ref)


def by_product(flag_ref, x_ref, out_ref):
    add((flag_ref[0] > 0).astype(jnp.int32) * 4, x_ref, out_ref)


def call(kernel, interpret):
    def run(flag, x):
        parameters = triton.CompilerParams()
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, compiler_params=parameters, interpret=interpret)(flag, x)

    return run


arguments = jnp.ones(1, jnp.int32), jnp.ones(64)
shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in arguments]
refused = {}
for kernel in (by_where, by_product):
    assert (call(kernel, True)(*arguments) == 4).all()
    try:
        jax.jit(call(kernel, False)).lower(*shapes).compile()
    except Exception as error:
        refused[kernel.__name__] = f"{type(error).__name__}: {error}"
    print(kernel.__name__, "interpreted; compiled:", refused.get(kernel.__name__, "yes").splitlines()[0][:200])
assert list(refused) == ["by_where"], refused
PY
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$folder/v/bin/python" "$folder/run.py"
