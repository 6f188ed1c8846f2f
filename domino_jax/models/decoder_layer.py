"""One pre-norm decoder layer of the Qwen3 or the Llama kind, used by the target and by the draft backbone.

What a query may read differs between the two, and between training and decoding; it is a function that the caller
passes in.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.models.attention import attend, attend_cache, attend_prompts, attend_row
from domino_jax.models.cache import LayerCache, append
from domino_jax.models.decoder_config import DecoderConfig
from domino_jax.models.layers import DECODED_ROWS, Linear, RMSNorm, SwiGLU, rotate
from domino_jax.models.moe import ExpertConfig, SparseFeedForward
from domino_jax.models.shapes import Mask
from domino_jax.models.sharding import constrain

Angles = tuple[jax.Array, jax.Array]
# (q [B,N,T,H], k [B,K,T,H], v [B,K,T,H]) → (attended [B,N,T,H], whatever the caller wants back). For run_layer it is a
# jax.tree_util.Partial of a module's function and the arrays that it reads.
Attention = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class SelfAttention(nn.Module):
    """Projections, per-head norms (with qk_norm) and rotation around an attention function."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    use_bias: bool = False
    dtype: Any = jnp.float32
    qk_norm: bool = True

    def setup(self):
        self.q_proj = Linear(self.heads * self.head_dim, self.use_bias, self.dtype)
        kv = {"features": self.kv_heads * self.head_dim, "kv_heads": self.kv_heads}
        self.k_proj = Linear(use_bias=self.use_bias, dtype=self.dtype, **kv)
        self.v_proj = Linear(use_bias=self.use_bias, dtype=self.dtype, **kv)
        self.o_proj = Linear(self.width, self.use_bias, self.dtype)
        if self.qk_norm:
            self.q_norm = RMSNorm(self.eps, self.dtype)
            self.k_norm = RMSNorm(self.eps, self.dtype)

    def _heads(self, x: jax.Array) -> jax.Array:
        """[B, T, heads·H] → [B, heads, T, H]."""
        if x.shape[0] * x.shape[1] <= DECODED_ROWS:
            # Else a TPU's compiler makes the reshape part of the product and transposes the whole matrix for it. On a
            # GPU the fence would cost three kernels a layer.
            x = jax.lax.platform_dependent(x, cuda=lambda x: x, default=jax.lax.optimization_barrier)
        return x.reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)

    def queries(self, x: jax.Array, angles: Angles) -> jax.Array:
        q = self._heads(self.q_proj(x))
        return rotate(self.q_norm(q) if self.qk_norm else q, angles)

    def keys_values(self, x: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] → keys (normed with qk_norm, rotated) and values, each [B, K, T, H]."""
        k = self._heads(self.k_proj(x))
        return rotate(self.k_norm(k) if self.qk_norm else k, angles), self._heads(self.v_proj(x))

    def __call__(self, x: jax.Array, angles: Angles, attention: Attention) -> tuple[jax.Array, Any]:
        attended, extra = attention(self.queries(x, angles), *self.keys_values(x, angles))
        return self.o_proj(attended.swapaxes(1, 2).reshape(*x.shape[:2], -1)), extra


class DecoderLayer(nn.Module):
    """x + attention(norm x), then + feed-forward(norm x), which is dense without `experts`."""

    config: DecoderConfig
    dtype: Any = jnp.float32
    experts: ExpertConfig | None = None

    def setup(self):
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
        self.self_attn = SelfAttention(
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            c.rms_norm_eps,
            c.attention_bias,
            self.dtype,
            c.qk_norm,
        )
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
        if self.experts is None:
            self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, self.dtype)
        else:
            self.mlp = SparseFeedForward(self.experts, c.hidden_size, self.dtype)

    def context_keys_values(self, context: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, K, T, H] of drafter context rows, which skip input_layernorm."""
        return self.self_attn.keys_values(context, angles)

    def __call__(self, x: jax.Array, angles: Angles, attention: Attention) -> tuple[jax.Array, Any]:
        """x [B, T, D] → (x [B, T, D], the second result of `attention`)."""
        attended, extra = self.self_attn(self.input_layernorm(x), angles, attention)
        x = constrain(x + attended, "batch")
        return constrain(x + self.mlp(self.post_attention_layernorm(x)), "batch"), extra


def token_attention(mask: Mask | None, documents: jax.Array | None = None) -> Attention:
    """Attention of the rows of a pass over each other: by `mask` bool [B, T, T], or causal inside each document."""
    return jax.tree_util.Partial(_attend_tokens, mask, documents)


def _attend_tokens(mask, documents, q, k, v):
    return attend_row(q, k, v, documents) if mask is None else attend(q, k, v, mask), None


def cache_attention(cache: LayerCache, slots: jax.Array, mask: Mask | None) -> Attention:
    """Attention over a cache, with the rows of the pass written at `slots` int32 [B, T] first; its second result is the
    written cache. mask: bool [B, T, S]; None for prompts, causal up to each row's own slot."""
    return jax.tree_util.Partial(_attend_cache, cache, slots, mask)


def _attend_cache(cache, slots, mask, q, k, v):
    written = append(cache, k, v, slots)
    if mask is not None:
        return attend_cache(q, *written, mask), written
    if k.shape[2] == written[0].shape[2]:  # a whole prompt: attention need not wait for the cache
        return attend_prompts(q, k, v), written
    return attend_prompts(q, *written, first=slots[0, 0]), written


def run_layer(layer: nn.Module, *args: Any, method: str = "__call__", remat: bool = False) -> Any:
    """A bound layer's method, traced and lowered once for all layers that are alike: the program calls one function.

    Args:
        args: arrays and trees of arrays; an attention function is a jax.tree_util.Partial.
        remat: what the method computes is computed again in the backward pass.
    """
    if layer.is_initializing():  # for the parameters alone, and attention has none
        return getattr(layer, method)(*(_skip_attention if callable(arg) else arg for arg in args))
    return run_alike(layer.clone(parent=None, name=None), method, remat, layer.variables["params"], *args)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_alike(layer: nn.Module, method: str, remat: bool, params: dict, *args: Any) -> Any:
    def run(params: dict, *args: Any) -> Any:
        return layer.apply({"params": params}, *args, method=method)

    return (jax.checkpoint(run) if remat else run)(params, *args)


def _skip_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
    return q, None
