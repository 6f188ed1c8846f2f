"""Causal attention of whole rows by JAX's splash kernel for TPUs: no score array, nothing done behind the diagonal.

Only for the frozen target's pass over training rows; everything else is nn/attention.py.
"""

import functools

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import PartitionSpec

LANES = 128  # a TPU register's width: what rows and heads have to be a multiple of
BLOCKS = (512, 256, 128)  # rows of a tile, the largest that divides the row


def usable(q: jax.Array, k: jax.Array) -> bool:
    """True when the mesh (jax.set_mesh) is of TPUs and q [B, N, T, H], k [B, K, T, H] have shapes the kernel takes."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.abstract_device is None or mesh.abstract_device.platform != "tpu":
        return False
    tensor = mesh.shape["tensor"]
    return q.shape[2] % LANES == 0 and q.shape[3] % LANES == 0 and k.shape[1] % tensor == 0


@functools.partial(jax.jit, static_argnames="interpret")  # traced once for all layers, which have the same shapes
def attend_causal(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None = None, interpret: bool = False
) -> jax.Array:
    """As nn.attention.attend_causal, each device working on its own rows and heads.

    interpret: run the kernel's program on any device, slowly, for a test.
    """
    scaled = (q * q.shape[-1] ** -0.5).astype(q.dtype)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _local(interpret, scaled, k, v, documents)
    rows = ("data", "fsdp") if q.shape[0] % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else None
    heads, whole = PartitionSpec(rows, "tensor"), PartitionSpec(rows)
    run = functools.partial(_local, interpret)
    return jax.shard_map(run, in_specs=(heads, heads, heads, whole), out_specs=heads, check_vma=False)(
        scaled, k, v, documents
    )


def _local(interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None) -> jax.Array:
    kernel = _kernel(q.shape[1], q.shape[2], interpret)
    if documents is None:
        return jax.vmap(kernel)(q, k, v)
    return jax.vmap(lambda q, k, v, own: kernel(q, k, v, splash_attention_kernel.SegmentIds(own, own)))(
        q, k, v, documents
    )


def _kernel(heads: int, length: int, interpret: bool):
    block = next(size for size in BLOCKS if length % size == 0)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    sizes = splash_attention_kernel.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    return splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
