"""The parallel backbone: a block [anchor, mask, …] reads fused target features and itself."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.method.config import DrafterConfig
from domino_jax.method.conv import ConvolvedLayer
from domino_jax.models import slices
from domino_jax.models.cache import LayerCache
from domino_jax.models.decoder_layer import Attention, DecoderLayer, run_layer
from domino_jax.models.layers import DECODED_ROWS, Linear, RMSNorm, apart_on_gpus, rotary_angles
from domino_jax.models.shapes import MASKED, Features, Hidden, Logits, Positions
from domino_jax.models.sharding import constrain


class Backbone(nn.Module):
    """fc and hidden_norm fuse the tapped features; Qwen3 layers run over the block; a final norm."""

    config: DrafterConfig
    dtype: Any = jnp.float32
    remat: bool = False  # layers are computed again in the backward pass

    def setup(self):
        c = self.config
        layer = ConvolvedLayer if c.conv_kernel_size else DecoderLayer
        self.fc = Linear(c.hidden_size, dtype=self.dtype)
        self.hidden_norm = RMSNorm(c.rms_norm_eps, self.dtype)
        self.layers = [layer(c, self.dtype) for _ in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.rms_norm_eps, self.dtype)

    def _angles(self, positions: Positions):
        return rotary_angles(positions, self.config.head_dim, self.config.rope_theta)

    def context_keys_values(self, features: Features, positions: Positions) -> tuple[LayerCache, ...]:
        """features [B, T, C·D] at absolute positions [B, T] → per layer keys and values [B, K, T, H]."""
        context = constrain(self.hidden_norm(self.fc(features)), "batch")
        angles = self._angles(positions)
        by_layer = []
        for layer in self.layers:
            by_layer.append(run_layer(layer, context, angles, method="context_keys_values"))
            if context.shape[0] * context.shape[1] <= DECODED_ROWS:
                # Else the compiler for GPUs joins the products of all layers, and copies their matrices in every round.
                context = apart_on_gpus(context)
        return tuple(by_layer)

    def __call__(
        self, x: Hidden, positions: Positions, attention: Callable[[int], Attention]
    ) -> tuple[Hidden, tuple[Any, ...]]:
        """Block rows x [B, T, D] → (normed hidden z [B, T, D], the results of each layer's attention).

        attention(i) is the attention function of layer i: over a cache, or over training blocks.
        """
        angles = self._angles(positions)
        x = scale(x, self.config.input_embedding_scale)
        extras = []
        for index, layer in enumerate(self.layers):
            x, extra = run_layer(layer, x, angles, attention(index), remat=self.remat)
            extras.append(extra)
        return self.norm(x), tuple(extras)


def scale(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def transformed_logits(logits: Logits, config: DrafterConfig) -> Logits:
    """The drafter's logits: the lm_head's, scaled by output_multiplier m and then capped at ±c.

    c·tanh(m·l / c) with the c of final_logit_softcapping, m·l without one.
    """
    logits, cap = scale(logits, config.output_multiplier), config.final_logit_softcapping
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def training_attention(
    context: LayerCache,
    anchors: jax.Array,
    keep: jax.Array,
    readable: jax.Array,
    reach: int | None = None,
    starts: jax.Array | None = None,
) -> Attention:
    """Attention of A blocks of G slots over the row's context and over their own block, one joint softmax.

    A query of block b reads context key t iff t < anchor_b (strict: this is what decoding sees), with a window also
    t ≥ anchor_b + slot - (window-1), and the `readable` slots of its block. Blocks that are
    not kept read nothing and get zeros. The context part and the block part are two score arrays under one softmax,
    and only slices.BLOCKS blocks of the context part live at a time, forward and backward.

    Args:
        context: keys and values [B, K, S, H] of the row.
        anchors: int32 [B, A].  keep: bool [B, A].
        readable: bool [G, G], of slots_read.  reach: the window, of DrafterConfig.reach.
        starts: int32 [B, A], where the anchor's document begins in a packed row; no key before it is read.
    """
    starts = jnp.zeros_like(anchors) if starts is None else starts
    return jax.tree_util.Partial(_over_blocks, context, anchors, starts, keep, reach, readable)


def _over_blocks(context, anchors, starts, keep, reach, readable, q, k, v):
    batch, heads, _, width = q.shape
    kv, blocks, block_size = k.shape[1], anchors.shape[1], readable.shape[0]
    q = q.reshape(batch, kv, heads // kv, blocks, block_size, width)
    k, v = (x.reshape(batch, kv, blocks, block_size, width) for x in (k, v))
    if blocks <= slices.BLOCKS:
        out = _attend_blocks(context, q, k, v, anchors, starts, keep, reach, readable)
    else:
        out = _attend_in_slices(slices.BLOCKS, (reach, readable), context, q, k, v, anchors, starts, keep)
    return out.reshape(batch, heads, blocks * block_size, width), None


def slots_read(size: int, window: int | None, causal: bool) -> jax.Array:
    """bool [G, G]: which slots of its block a query reads; a window reaches as far forward as back.

    >>> size 3, window 2, causal  →  1 0 0    not causal  →  1 1 0    no window  →  1 1 1
                                     1 1 0                   1 1 1                  1 1 1
                                     0 1 1                   0 1 1                  1 1 1
    """
    back = jnp.arange(size)[:, None] - jnp.arange(size)
    reads = jnp.ones((size, size), bool) if window is None else jnp.abs(back) < window
    return reads & (back >= 0) if causal else reads


def _attend_in_slices(size: int, rule: tuple, context: LayerCache, q, k, v, anchors, starts, keep) -> jax.Array:
    """_attend_blocks for `size` blocks at a time; their scores are made again in the backward pass."""
    # Their gradients are summed over the slices, in float32 as one product would sum them.
    context = jax.tree.map(lambda x: x.astype(jnp.float32), context)
    of_blocks = (slices.cut(x, 1, size) for x in (anchors, starts, keep))
    parts = (slices.cut(q, 3, size), slices.cut(k, 2, size), slices.cut(v, 2, size), *of_blocks)
    attend = jax.checkpoint(lambda part: _attend_blocks(context, *part, *rule))
    return slices.join(jax.lax.map(attend, parts), 3, anchors.shape[1])


def _attend_blocks(
    context: LayerCache, q, k, v, anchors, starts, keep, reach: int | None, readable: jax.Array
) -> jax.Array:
    """Queries [B, K, R, A, G, H] over the context and over block keys and values [B, K, A, G, H] → as the queries."""
    context_k, context_v = (x.astype(k.dtype) for x in context)
    batch, kv, _, _, slots, width = q.shape
    context_mask = _context_mask(anchors, starts, keep, context_k.shape[2], slots, reach)
    block_mask = readable & keep[:, :, None, None]
    f32 = {"preferred_element_type": jnp.float32}
    # R, A and G as one axis: XLA:CPU makes one matmul of it (15 ms for 30, forward and backward, A 48, G 8, S 224).
    rows = q.reshape(batch, kv, -1, width)
    to_context = jnp.einsum("bkqh,bksh->bkqs", rows, context_k, **f32).reshape(*q.shape[:-1], -1) * width**-0.5
    to_block = jnp.einsum("bkragh,bkauh->bkragu", q, k, **f32) * width**-0.5
    to_context = jnp.where(context_mask[:, None, None], to_context, MASKED)
    to_block = jnp.where(block_mask[:, None, None], to_block, MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(to_context.max(-1), to_block.max(-1)))[..., None]
    exp_context, exp_block = jnp.exp(to_context - top), jnp.exp(to_block - top)
    total = (exp_context.sum(-1) + exp_block.sum(-1))[..., None]
    weights = (exp_context / total).astype(v.dtype).reshape(batch, kv, -1, context_k.shape[2])
    out = jnp.einsum("bkqs,bksh->bkqh", weights, context_v, **f32).reshape(q.shape)
    out += jnp.einsum("bkragu,bkauh->bkragh", (exp_block / total).astype(v.dtype), v, **f32)
    return jnp.where(keep[:, None, None, :, None, None], out, 0.0).astype(q.dtype)


def _context_mask(anchors, starts, keep, length: int, slots: int, window: int | None) -> jax.Array:
    """Marks the context keys that A blocks of G slots read: bool [B, A, G, S]."""
    key_position = jnp.arange(length)
    before = (key_position < anchors[..., None]) & (key_position >= starts[..., None])
    mask = jnp.broadcast_to(before[:, :, None], (*anchors.shape, slots, length))
    if window is not None:
        query_position = anchors[:, :, None] + jnp.arange(slots)
        mask &= key_position >= query_position[..., None] - (window - 1)
    return mask & keep[:, :, None, None]
