#!/usr/bin/env bash
# jax 0.10.2 with jax-cuda12-plugin, compiled for an H100. No GPU is needed; Linux on x86.
# Guess: a parameter with a layout of one's choice (jax.experimental.layout) is read in that layout wherever it is used.
#   A matrix [256, 151936] stored with the 256 numbers of a token side by side is then good for reading a few tokens'
#   numbers.
# What happens: it is, in a program without a loop. In the body of a while_loop the compiler uses the default layout,
#   and before the loop it copies the whole matrix into it. The executable still states the layout that was asked for.
# Why it matters: a decoding loop has the matrix in memory twice and moves it at every call, which the compiled body
#   alone does not show. The transposed shape, stored as it is, needs no copy.
# Output seen: temporary memory without a loop 0.03 MB, in a loop 77.8 MB; as a matrix [151936, 256] 0.03 MB in a loop.
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
from jax.experimental.layout import Format, Layout

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
TOKENS, WIDTH = 151_936, 256


def once(matrix, ids, turns):
    rows = matrix if matrix.shape[0] == TOKENS else matrix.T
    return jnp.take(rows, ids, axis=0).astype(jnp.float32).sum(axis=0)


def loop(matrix, ids, turns):
    def turn(index, total):
        return total + once(matrix, (ids + index + total[0].astype(jnp.int32)) % TOKENS, turns)

    return jax.lax.fori_loop(0, turns, turn, jnp.zeros(WIDTH))


def megabytes(function, shape, order):
    """Temporary memory, with the axes of the matrix stored in this order, the last one side by side."""
    matrix = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=Format(Layout(order), place))
    numbers = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place) for shape in ((64,), ()))
    program = jax.jit(function).lower(matrix, *numbers).compile()
    assert program.input_formats[0][0].layout.major_to_minor == order
    return program.memory_analysis().temp_size_in_bytes / 1e6


stored = {function.__name__: megabytes(function, (WIDTH, TOKENS), (1, 0)) for function in (once, loop)}
turned = megabytes(loop, (TOKENS, WIDTH), (0, 1))
print(f"MB of temporary memory: once {stored['once']:.2f}, loop {stored['loop']:.1f}, transposed shape {turned:.2f}")
assert stored["once"] < 1 and turned < 1
assert stored["loop"] > 2 * TOKENS * WIDTH / 1e6 - 1, "the loop now reads the layout that was asked for"
PY
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 "$folder/v/bin/python" "$folder/run.py"
