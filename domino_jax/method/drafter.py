"""The drafter as one module: backbone, optional head, and the two ways it runs (training blocks, decoding)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.method.backbone import Backbone, slots_read, training_attention
from domino_jax.method.blocks import slot_positions
from domino_jax.method.config import DrafterConfig
from domino_jax.method.pair import TargetRows
from domino_jax.models.cache import Cache, append, block_mask, init_cache, slots_of
from domino_jax.models.decoder_layer import cache_attention
from domino_jax.models.shapes import Features, Hidden, Lengths, Positions


class Drafter(nn.Module):
    """Parameters: {"backbone": …, "head": …}, "head" if it has one. No embeddings: those are the target's."""

    config: DrafterConfig
    dtype: Any = jnp.float32
    remat: bool = False  # training: backbone layers are computed again in the backward pass
    whole_head: bool = False  # decoding on a mesh: every device holds and computes the whole head

    def setup(self):
        self.backbone = Backbone(self.config, self.dtype, self.remat)
        if self.config.has_head:
            self.head = self.config.module(self.config, self.dtype, self.whole_head)

    def __call__(
        self,
        features: Features,
        x: jax.Array,
        anchors: jax.Array,
        keep: jax.Array,
        inputs: jax.Array,
        positions: Positions | None = None,
    ) -> tuple[Hidden, jax.Array | None]:
        """The teacher-forced forward of A blocks per row; also what `init` traces.

        Args:
            features: [B, S, C·D].  x: block embeddings [B, A, G, D].  anchors int32, keep bool [B, A].
            inputs: what the head reads of the tokens before its T slots (`Head`), [B, A, T, D] or int32 [B, A, T].
            positions: int32 [B, S] of packed rows, from 0 in each document; a block sees its own document only.

        Returns:
            z [B, A, G, D], and the head's codes [B, A, M, E] (None without one) to put through its `residual`.
        """
        z = self.block_hidden(self.context_of(features, positions), x, anchors, keep, positions)
        if not self.config.has_head:
            return z, None
        codes = self.codes(z, inputs)
        if self.is_initializing():
            self.head.use_all(z, codes)
        return z, codes

    def codes(self, z: Hidden, inputs: jax.Array) -> jax.Array:
        """The head's codes [B, A, M, E] of blocks z [B, A, G, D], after tokens given as `inputs` of a forward."""
        read = z[:, :, self.config.first_slot - self.config.extra_slots :]
        rows, inputs = (part.reshape(-1, *part.shape[2:]) for part in (read, inputs))
        codes = self.head.codes(self.head.z_terms(rows), inputs)
        return codes.reshape(*read.shape[:3], -1)[:, :, self.config.extra_slots :]

    def context_of(self, features: Features, positions: Positions | None = None) -> Cache:
        """The context's keys and values for `block_hidden`."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(features.shape[1]), features.shape[:2])
        return self.backbone.context_keys_values(features, positions)

    def block_hidden(
        self, context: Cache, x: jax.Array, anchors: jax.Array, keep: jax.Array, positions: Positions | None = None
    ) -> Hidden:
        """Computes z [B, A, G, D] of all blocks; the forward declares the arguments, `context_of` makes the context."""
        batch, blocks, slots, width = x.shape
        starts, first = None, anchors
        if positions is not None:
            first = jnp.take_along_axis(positions, anchors, axis=1)
            starts = anchors - first

        def attention(layer):
            readable = slots_read(slots, self.config.window(layer), self.config.causal(layer))
            return training_attention(context[layer], anchors, keep, readable, self.config.reach(layer), starts)

        block_positions = slot_positions(first, slots).reshape(batch, blocks * slots)
        z, _ = self.backbone(x.reshape(batch, blocks * slots, width), block_positions, attention)
        return z.reshape(batch, blocks, slots, width)

    def example(self) -> tuple:
        """Arguments with which `init` traces the forward."""
        c = self.config
        features = jnp.zeros((1, 2, len(c.target_layer_ids) * c.hidden_size))
        block = jnp.zeros((1, 1, c.block_size, c.hidden_size))
        slots = c.extra_slots + c.num_drafts
        inputs = block[:, :, :slots] if c.reads_embeddings else jnp.zeros((1, 1, slots), jnp.int32)
        return features, block, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), inputs

    def init_cache(self, batch: int, slots: int) -> Cache:
        c = self.config
        return init_cache(c.num_hidden_layers, batch, slots, c.num_key_value_heads, c.head_dim, self.dtype)

    def extend_context(self, cache: Cache, text: TargetRows, positions: Positions) -> Cache:
        """Writes context keys and values of features [B, T, C·D] at absolute positions int32 [B, T]."""
        rows = self.backbone.context_keys_values(text.features, positions)
        return tuple(append(layer, k, v, positions) for layer, (k, v) in zip(cache, rows, strict=True))

    def draft_hidden(self, cache: Cache, x: jax.Array, lengths: Lengths) -> tuple[Hidden, Cache]:
        """Block embeddings x [B, G, D] at positions length.. → (z [B, G, D], the cache).

        A slot reads the committed context and its block as in training (`training_attention`). The block's rows are
        written after the length; the next `extend_context` overwrites them with the accepted tokens' features.
        """
        positions = lengths[:, None] + jnp.arange(x.shape[1])

        def attention(layer):
            readable = slots_read(x.shape[1], self.config.window(layer), self.config.causal(layer))
            mask = block_mask(lengths, readable, slots_of(cache), self.config.reach(layer))
            return cache_attention(cache[layer], positions, mask)

        return self.backbone(x, positions, attention)


def init_drafter_params(drafter: Any, key: jax.Array) -> dict:
    """Fresh float32 parameters of a drafter of any kind: normal(0, 0.02) linears, ones for norms, torch's uniform for
    the GRU, zeros for blocks that start as the identity."""
    return drafter.init(key, *drafter.example())["params"]
