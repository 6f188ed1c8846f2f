"""Eight bits save bytes: by absent devices' compilers no verifying pass writes a copy of a matrix."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

COMPILE = """
import json, math, sys
import jax, jax.numpy as jnp
from benchmarks.compilers import decode, program_text, programs as p
from domino_jax.forecast import dry_run, topologies
from domino_jax.models import quantized, sharding
from domino_jax.weights.quantization import PUBLIC_FP8, QUANTIZE, read_scheme
mesh = sharding.make_mesh(1, 1, 1, list(topologies.devices_of(sys.argv[1]))[:1])
models = p.models_on(mesh, "0.6b", layers=3)
schemes = {"int8": QUANTIZE["int8"], "fp8": read_scheme({"quantization_config": PUBLIC_FP8})}

def weights_written(text):
    # The axes of a matrix are multiples of 128, and an activation has one of rows, heads or blocks that is not. By the
    # sizes alone the scores [8, 32, 4096] of a draft would be a copy of k_proj [1024, 1024]. Slices of the head's small
    # matrices do not count.
    axes = {dims: [size for size in dims if size > 1] for dims in program_text.arrays_written(text)}
    large = {dims: sizes for dims, sizes in axes.items() if len(sizes) > 1 and math.prod(sizes) >= 2**20}
    return [dims for dims, sizes in large.items() if not any(size % 128 for size in sizes)]

def examined(part, label):
    with jax.set_mesh(mesh):
        text = decode.compile_program(mesh, *p.chains(mesh, part)[label]).as_text()
        must = p.must_move(part, p.state_on(mesh, part))[label]
    return [weights_written(text), program_text.traffic(text) / must]

found = {}
for name, scheme in schemes.items():
    part = models.replace(target_params=dry_run.target_shapes(models.target, mesh, scheme))
    found[name] = examined(part, "verify17")
if sys.argv[1] == "h100":  # whose compiler joins products of the same rows
    part = p.with_drafter(mesh, models, models.drafter.config, int8=True)
    found["drafter"] = examined(part, "round64")
place = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
kernel = {"q": array((4096, 4096), jnp.int8), "scale": array((1, 4096), jnp.float32)}
scaled_first = jax.jit(lambda x, kernel: x @ quantized.dequantized(kernel).astype(x.dtype))
text = scaled_first.lower(array((17, 4096), jnp.bfloat16), kernel).compile().as_text()
found["scaled first"] = [weights_written(text), 0]
print(json.dumps(found))
"""
COMPILERS = importlib.util.find_spec("libtpu") and importlib.util.find_spec("jax_cuda12_plugin")


@pytest.mark.slow(minutes=2)
@pytest.mark.skipif(not COMPILERS, reason="needs requirements-compile.txt")
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2", "h100"])
def test_a_verifying_pass_writes_no_copy_of_a_weight(topology):
    command = [sys.executable, "-c", COMPILE, topology]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    written = {name: copies for name, (copies, _) in found.items() if copies and name != "scaled first"}
    assert not written, written
    assert max(found[name][1] for name in ("int8", "fp8")) < 1.4
    # The control: scaled before the product, the compiler for GPUs writes the matrix in bfloat16.
    assert bool(found["scaled first"][0]) == (topology == "h100")
