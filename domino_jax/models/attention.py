"""Grouped-query attention as algebra: two einsums and a float32 softmax, the mask given by the caller."""

import functools

import jax
import jax.numpy as jnp

from domino_jax.models import gpu_attention, tpu_attention
from domino_jax.models.long_attention import REFUSED, attend_long
from domino_jax.models.shapes import MASKED, Mask
from domino_jax.models.slices import cut, join

# Attention scores of a prefill that live at once, 268 MB in float32.
PREFILL_SCORES = 2**26
PART_ROWS, ROW_PARTS = 512, 8  # of attend_row
KERNELS = {"tpu": tpu_attention, "cuda": gpu_attention}  # by platform, for caches


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
    """Attention of q [B, N, T, H] over k, v [B, K, S, H] → [B, N, T, H].

    Args:
        mask: bool [B, T, S]; a query whose row is all False returns zeros.

    Query head h reads key/value head h // R. Scores and softmax are float32 for every input dtype.
    Keys come head-first because the cache holds them so: with S before K, XLA:CPU transposes the whole cache each step
    (3.1 → 2.8 ms for nine rows, 24 layers × 128 wide, 384 slots). R and T are one axis in both products: with two of
    them, XLA transposes all keys first, for GPU and for CPU (there, attention of these 24 layers alone: 1.40 → 1.19 ms
    for nine rows, 0.84 → 0.67 for one).
    """
    f32 = {"preferred_element_type": jnp.float32}
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    scores = jnp.einsum("bkqh,bksh->bkqs", rows, k, **f32) * k.shape[3] ** -0.5
    scores = jnp.where(mask[:, None, None], scores.reshape(*rows.shape[:2], -1, *mask.shape[1:]), MASKED)
    weights = jax.nn.softmax(scores, axis=-1)
    weights = jnp.where(mask.any(-1)[:, None, None, :, None], weights, 0.0).astype(v.dtype)
    out = jnp.einsum("bkqs,bksh->bkqh", weights.reshape(*rows.shape[:3], -1), v, **f32)
    return out.astype(q.dtype).reshape(q.shape)


def attend_cache(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
    """`attend` over a cache; on TPUs and GPUs by a kernel when there are many scores. Kernels have no derivative."""
    used = {
        platform: functools.partial(attend_long, kernel.kernel_call)
        for platform, kernel in KERNELS.items()
        if "attention" not in REFUSED and kernel.applies(q, k)
    }
    return jax.lax.platform_dependent(q, k, v, mask, default=attend, **used) if used else attend(q, k, v, mask)


def attend_prompts(q: jax.Array, k: jax.Array, v: jax.Array, first: int | jax.Array = 0) -> jax.Array:
    """`attend_causal` of the prompts of a prefill, in slices whose scores are PREFILL_SCORES in all, or fewer.

    Whole, the scores of one Qwen3-8B layer over eight prompts of 4,096 tokens are 17 GB. Slices of fewer than 64
    queries would leave matrix units idle, so a very large batch of very long prompts takes more.
    """
    rows = PREFILL_SCORES // (q.shape[0] * q.shape[1] * k.shape[2])
    power_of_two = 1 << max(rows, 1).bit_length() - 1  # as the buckets of prompt lengths are, so no slice is short
    return attend_causal(q, k, v, slice_rows=min(max(power_of_two, 64), 512), first=first)


def attend_causal(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: jax.Array | None = None,
    slice_rows: int = 512,
    first: int | jax.Array = 0,
) -> jax.Array:
    """Causal attention of q [B, N, T, H] over k, v [B, K, S, H], `slice_rows` queries at a time.

    The [N, T, S] scores of a long row would be the largest array of a training step; a slice of them is made, used and
    dropped. Equal to `attend` with `causal_mask`.

    Args:
        documents: int32 [B, S] of packed rows: a query reads keys of its query_documents document only.
        first: the place of the first query among the keys, a scalar; the queries follow one another.
    """
    length, keys = q.shape[2], k.shape[2]
    index = first + jnp.arange(length)
    query_documents = None if documents is None else jax.lax.dynamic_slice_in_dim(documents, first, length, axis=1)
    if length <= slice_rows:
        return attend(q, k, v, causal_mask(index, keys, query_documents, documents))

    def attend_slice(part):
        rows, index, query_documents = part
        return attend(rows, k, v, causal_mask(index, keys, query_documents, documents))

    query_documents = None if documents is None else cut(query_documents, 1, slice_rows)
    parts = (cut(q, 2, slice_rows), cut(index, 0, slice_rows), query_documents)
    return join(jax.lax.map(attend_slice, parts), 2, length)


def attend_row(q: jax.Array, k: jax.Array, v: jax.Array, documents: jax.Array | None = None) -> jax.Array:
    """`attend_causal` of whole rows, T = S, in up to ROW_PARTS parts of queries, each over the keys up to its end.

    Keys that are later than all queries of a part are not multiplied: of 3,072 tokens in six parts 0.58 of all pairs
    remain, and half of them have to.
    """
    length = q.shape[2]
    size = PART_ROWS * -(-length // (PART_ROWS * ROW_PARTS))

    def part(start: int) -> jax.Array:
        end = min(start + size, length)
        before = None if documents is None else documents[:, :end]
        return attend_causal(q[:, :, start:end], k[:, :, :end], v[:, :, :end], before, PART_ROWS, start)

    return jnp.concatenate([part(start) for start in range(0, length, size)], axis=2)


def causal_mask(
    index: jax.Array, length: int, query_documents: jax.Array | None = None, documents: jax.Array | None = None
) -> Mask:
    """bool [1 or B, T, S]: the query at place index[t] (int32 [T]) reads keys that are not later.

    Args:
        length: S.  documents: int32 [B, S] of packed rows, and query_documents int32 [B, T] of the queries: only
            keys of the query's document are read.

    >>> index 0 1 2, length 3  →  1 0 0    documents 1 1 2  →  1 0 0
                                  1 1 0                        1 1 0
                                  1 1 1                        0 0 1
    """
    mask = (index[:, None] >= jnp.arange(length)[None, :])[None]
    if documents is not None:
        mask = mask & (query_documents[:, :, None] == documents[:, None, :])
    return mask
