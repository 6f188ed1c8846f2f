"""sglang-jax's two Pallas kernels as plain JAX, so that its real path of a drafter runs on a CPU.

On a CPU the engine takes its "native" attention, which knows nothing of speculative decoding. `install` keeps the
attention that it has on a TPU and puts these functions in the place of the kernels. They are for tests: they read all
pages of all requests for every token.
"""

import jax
import jax.numpy as jnp


def install() -> None:
    from sgl_jax.srt.layers.attention import flashattention_backend
    from sgl_jax.srt.layers.attention.hybrid_linear_attn_backend import attn_backend_wrapper
    from sgl_jax.srt.mem_cache import memory_pool
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    def paged_backend(runner):
        backend = flashattention_backend.FlashAttention(
            runner.num_attn_heads,
            runner.num_kv_heads,
            runner.model_config.head_dim,
            page_size=runner.page_size,
            mesh=runner.mesh,
        )
        return attn_backend_wrapper(runner, backend)

    ModelRunner._get_attention_backend = paged_backend
    flashattention_backend.ragged_paged_attention_v3 = ragged_paged_attention
    flashattention_backend.get_tuned_block_sizes_v3 = lambda *args, **kwargs: None
    memory_pool.kv_cache_update_impl = write_rows


def ragged_paged_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cache: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    cu_kv_lens: jax.Array,
    distribution: jax.Array,
    custom_mask: jax.Array | None = None,
    attention_sink: jax.Array | None = None,
    *,
    causal: int = 1,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    **unused,
) -> tuple[jax.Array, jax.Array]:
    """The tokens' keys and values go into their pages; then all tokens read all pages of their sequence.

    queries [T, H, D], keys and values [T, K, D] of sequences one after another; cache [pages, page, 2K/p, p, ≥D] with
    keys and values of a head side by side; cu_kv_lens in tokens, each sequence from a whole page.
    """
    if custom_mask is not None or attention_sink is not None:
        raise NotImplementedError("Trees and attention sinks are not in the CPU stand-in.")
    tokens, heads, width = queries.shape
    kv_heads, page = keys.shape[1], cache.shape[1]
    row = jnp.arange(tokens)
    owner = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], row, side="right"), kv_lens.shape[0] - 1)
    used = (row < cu_q_lens[-1]) & (owner < distribution[2]) & (kv_lens[owner] > 0)
    place = kv_lens[owner] - (cu_q_lens[owner + 1] - row)
    slot = page_indices[(cu_kv_lens[owner] + place) // page] * page + place % page

    flat = cache.reshape(-1, 2 * kv_heads, cache.shape[-1])
    new = jnp.stack([keys, values], axis=2).reshape(tokens, 2 * kv_heads, width)
    new = jnp.pad(new, ((0, 0), (0, 0), (0, flat.shape[-1] - width))).astype(flat.dtype)
    flat = flat.at[jnp.where(used, slot, flat.shape[0])].set(new, mode="drop")
    cache = flat.reshape(cache.shape)

    read = flat.reshape(-1, page, *flat.shape[1:])[page_indices].reshape(-1, *flat.shape[1:])[..., :width]
    index = jnp.arange(read.shape[0])
    key_owner = jnp.minimum(jnp.searchsorted(cu_kv_lens[1:], index, side="right"), kv_lens.shape[0] - 1)
    key_place = index - cu_kv_lens[key_owner]
    mask = (key_owner == owner[:, None]) & (key_place < kv_lens[key_owner]) & used[:, None]
    if causal:
        mask &= key_place <= place[:, None]
    if sliding_window:
        mask &= key_place > place[:, None] - sliding_window
    grouped = queries.reshape(tokens, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("tkrd,skd->tkrs", grouped, read[:, ::2], preferred_element_type=jnp.float32) * sm_scale
    scores = jnp.where(mask[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(read.dtype)
    out = jnp.einsum("tkrs,skd->tkrd", weights, read[:, 1::2], preferred_element_type=jnp.float32)
    out = jnp.where(used[:, None, None, None], out, 0.0)
    return out.reshape(queries.shape).astype(queries.dtype), cache


def write_rows(new_kv, slices, kv_cache, num_kv_update_slices, page_size, num_slices_per_block):
    """slices int32 [3, N]: slot of the cache, row of new_kv, and 1, or 0 for a row that is not written."""
    flat = kv_cache.reshape(-1, *kv_cache.shape[2:])
    rows = new_kv.reshape(-1, *new_kv.shape[2:])
    slots, source, lengths = slices
    return flat.at[jnp.where(lengths > 0, slots, flat.shape[0])].set(rows[source], mode="drop").reshape(kv_cache.shape)
