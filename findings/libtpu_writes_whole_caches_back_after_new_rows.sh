#!/usr/bin/env bash
# jax 0.10.2 with libtpu 0.0.42.1, compiled for a v6e. No TPU is needed; Linux on x86.
# Guess: a donated key/value cache that gets 32 new rows by dynamic_update_slice and is then read by a Pallas kernel
#   is updated where it is. The program reads the cache once and writes the new rows.
# What happens: the compiler copies the whole cache into vector memory, which has 128 MiB on a v6e, writes the rows
#   there, lets the kernel read it there, and copies the whole cache back. In eight layers it does so for 14 of 16
#   caches. Tried once: with einsums in place of the kernel too; with 28 layers, or for a v5e or a v5p, for none.
#   pltpu.with_memory_space_constraint(cache, pltpu.HBM) at the kernel's operands prevents it.
# Why it matters: a decoding step is as fast as its bytes. Here they are 1.8 times what is needed, and memory_analysis
#   shows nothing.
# Output seen: as it is: 14 of 16 caches are written back whole, 117.4 MB; constrained: 0 of 16, 0.0 MB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" "libtpu==0.0.42.1"
cat >"$folder/run.py" <<'PY'
import re

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

LAYERS, HEADS, SLOTS, WIDTH, ROWS, PART = 8, 8, 4096, 128, 32, 2048
chip = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x4").devices[0]
place = jax.sharding.SingleDeviceSharding(chip)


def kernel(q, k, v, out, total):
    @pl.when(pl.program_id(1) == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    f32 = {"preferred_element_type": jnp.float32}
    scores = jax.lax.dot_general(q[0], k[0], (((1,), (1,)), ((), ())), **f32)
    total[...] += jax.lax.dot_general(scores.astype(v.dtype), v[0], (((1,), (0,)), ((), ())), **f32)

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        out[0] = total[...].astype(out.dtype)


def attend(q, k, v, constrained):
    if constrained:
        k, v = (pltpu.with_memory_space_constraint(cache, pltpu.HBM) for cache in (k, v))
    rows = pl.BlockSpec((1, ROWS, WIDTH), lambda head, part: (head, 0, 0))
    slots = pl.BlockSpec((1, PART, WIDTH), lambda head, part: (head, part, 0))
    return pl.pallas_call(
        kernel,
        grid=(HEADS, SLOTS // PART),
        in_specs=[rows, slots, slots],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct((HEADS, ROWS, WIDTH), jnp.bfloat16),
        scratch_shapes=[pltpu.VMEM((ROWS, WIDTH), jnp.float32)],
    )(q, k, v)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def written_back(constrained):
    def decode(caches, x, weights, start):
        after = []
        for (k, v), weight in zip(caches, weights):
            new = (x @ weight).reshape(ROWS, HEADS, WIDTH).transpose(1, 0, 2)
            k, v = (jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=1) for cache in (k, v))
            x = x + attend(new, k, v, constrained).transpose(1, 0, 2).reshape(ROWS, -1)
            after.append((k, v))
        return after, x

    caches = [(array(HEADS, SLOTS, WIDTH), array(HEADS, SLOTS, WIDTH))] * LAYERS
    weights = [array(HEADS * WIDTH, HEADS * WIDTH)] * LAYERS
    arguments = caches, array(ROWS, HEADS * WIDTH), weights, array(dtype=jnp.int32)
    program = jax.jit(decode, donate_argnums=0).lower(*arguments).compile()
    whole = rf"bf16\[{HEADS},{SLOTS},{WIDTH}\]" + r"\{([^}]*)\}"
    copies = re.findall(rf"\({whole}, {whole}, [^=]*\) copy-start\(", program.as_text())
    # The result of a copy comes before its operand; S(1) is vector memory.
    return sum("S(1)" not in result and "S(1)" in operand for result, operand in copies)


counts = {"as it is": written_back(False), "constrained": written_back(True)}
for name, count in counts.items():
    megabytes = count * HEADS * SLOTS * WIDTH * 2 / 1e6
    print(f"{name}: {count} of {2 * LAYERS} caches are written back whole, {megabytes:.1f} MB")
assert counts["as it is"] > LAYERS, "the caches are updated in place now"
assert counts["constrained"] == 0, "the constraint has no effect now"
PY
ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 TPU_SKIP_MDS_QUERY=1 TPU_WORKER_ID=0 \
    TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_WORKER_HOSTNAMES=localhost "$folder/v/bin/python" "$folder/run.py"
