#!/usr/bin/env bash
# flax 0.12.8 and jax 0.10.2 with libtpu 0.0.42.1, compiled for a TPU v5e. No TPU is needed; Linux on x86.
# Guess: linen.Embed with dtype=bfloat16 over a float32 table reads the rows of the tokens and converts those: XLA fuses
#   elementwise operations into what reads their result. So do the compilers for CPUs and GPUs.
# What happens: the TPU's compiler does not fuse into a gather. Every call converts the whole table and writes it to
#   memory, then reads four rows of it. A table in int8 with a scale per row is dequantised in whole, and
#   log_softmax(logits) at the labels writes all of the log_softmax. Tried once, v5p and v6e do the same.
# Why it matters: a decoding step of one token moves the table one and a half times, and holds a second one of half its
#   size. Take the rows first and convert them then; take the logits first and subtract logsumexp.
# Output seen: temporary memory for 4 tokens of 151,936: linen.Embed 311.2 MB, int8 311.2 MB, take first 0.0 MB; for
#   labels: log_softmax 311.2 MB, logsumexp 0.0 MB. linen.Embed on a CPU: 0.0 MB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "jax==0.10.2" "jaxlib==0.10.2" "flax==0.12.8" \
    "libtpu==0.0.42.1"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
from flax import linen
from jax.experimental import topologies

TOKENS, WIDTH, ROWS = 151_936, 1024, 512
tpu = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1)).devices[0]
module = linen.Embed(TOKENS, WIDTH, dtype=jnp.bfloat16)


def embed(table, tokens):
    return module.apply({"params": {"embedding": table}}, tokens)


def take_first(table, tokens):
    return jnp.take(table, tokens, axis=0).astype(jnp.bfloat16)


def int8(table, scale, tokens):
    return jnp.take(table.astype(jnp.bfloat16) * scale, tokens, axis=0)


def log_softmax(logits, labels):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=1)


def logsumexp(logits, labels):
    return jnp.take_along_axis(logits, labels, axis=1) - jax.nn.logsumexp(logits, axis=1, keepdims=True)


def temporary_megabytes(device, function, *arguments):
    place = jax.sharding.SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in arguments]
    memory = jax.jit(function).lower(*shapes).compile().memory_analysis()
    megabytes = memory.temp_size_in_bytes / 1e6
    print(f"{device.platform} {function.__name__}: {megabytes:.1f} MB of temporary memory")
    return megabytes


table, tokens = ((TOKENS, WIDTH), jnp.float32), ((4,), jnp.int32)
logits, labels = ((ROWS, TOKENS), jnp.float32), ((ROWS, 1), jnp.int32)
quantised = ((TOKENS, WIDTH), jnp.int8), ((TOKENS, 1), jnp.bfloat16)
assert temporary_megabytes(jax.devices("cpu")[0], embed, table, tokens) < 1
assert temporary_megabytes(tpu, take_first, table, tokens) < 1
assert temporary_megabytes(tpu, logsumexp, logits, labels) < 1
for function, arguments in ((embed, (table, tokens)), (int8, (*quantised, tokens)), (log_softmax, (logits, labels))):
    assert temporary_megabytes(tpu, function, *arguments) > 300, f"{function.__name__} is now fused into the gather"
PY
JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=3 TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-8 \
    TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0 ALLOW_MULTIPLE_LIBTPU_LOAD=1 "$folder/v/bin/python" "$folder/run.py"
