"""The drafter as one module: backbone, optional head, and the two ways it runs (training blocks, decoding)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from domino_jax.method.backbone import Backbone, slots_read, training_attention
from domino_jax.method.blocks import slot_positions
from domino_jax.method.config import DrafterConfig
from domino_jax.method.pair import TargetRows
from domino_jax.models.attention import attend_cache
from domino_jax.models.cache import Cache, LayerCache, append, block_mask, init_cache, slots_of
from domino_jax.models.decoder_layer import Attention
from domino_jax.models.shapes import Features, Hidden, Lengths, Positions


class Drafter(nn.Module):
    """Parameters: {"backbone": …, "head": …}, "head" if it has one. No embeddings: those are the target's."""

    config: DrafterConfig
    dtype: Any = jnp.float32
    attention_blocks: int | None = None  # training: blocks whose attention scores live at a time; None is all
    remat: bool = False  # training: backbone layers are computed again in the backward pass
    whole_head: bool = False  # decoding on a mesh: every device holds and computes the whole head

    def setup(self):
        self.backbone = Backbone(self.config, self.dtype, self.remat)
        if self.config.has_head:
            self.head = self.config.head_module(self.dtype, self.whole_head)

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
            inputs: of the tokens before the T slots that it sees, what the head reads (`Head`): embeddings
                [B, A, T, D] or ids int32 [B, A, T].
            positions: int32 [B, S] of packed rows, from 0 in each document; a block sees its own document only.

        Returns:
            z [B, A, G, D], and the head's codes [B, A, M, E] (None without one) to put through its `residual`; the full
            logits are left to the caller, who takes them in slices.
        """
        z = self.block_hidden(features, x, anchors, keep, positions)
        if not self.config.has_head:
            return z, None
        codes = self.block_codes(z, inputs)
        if self.is_initializing():
            self.head.residual(codes)
            if self.config.has_confidence:
                self.head.confidence(z, jnp.zeros(z.shape[:-1], jnp.int32))
        return z, codes

    def block_codes(self, z: Hidden, inputs: jax.Array) -> jax.Array:
        """The head's codes [B, A, M, E] of blocks z [B, A, G, D], after tokens given as `inputs` of a forward."""
        read = z[:, :, self.config.first_slot - self.config.lead :]
        codes = self.head.codes(*(part.reshape(-1, *part.shape[2:]) for part in (read, inputs)))
        return codes.reshape(*read.shape[:3], -1)[:, :, self.config.lead :]

    def block_hidden(
        self, features: Features, x: jax.Array, anchors: jax.Array, keep: jax.Array, positions: Positions | None = None
    ) -> Hidden:
        """z [B, A, G, D] of every block at once."""
        batch, blocks, slots, width = x.shape
        starts, first = None, anchors
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(features.shape[1]), features.shape[:2])
        else:
            first = jnp.take_along_axis(positions, anchors, axis=1)
            starts = anchors - first
        context = self.backbone.context_keys_values(features, positions)

        def attention(layer):
            choices = {"causal": self.config.causal(layer), "starts": starts, "slice_blocks": self.attention_blocks}
            return training_attention(context[layer], anchors, keep, slots, self.config.window(layer), **choices)

        block_positions = slot_positions(first, slots).reshape(batch, blocks * slots)
        z, _ = self.backbone(x.reshape(batch, blocks * slots, width), block_positions, attention)
        return z.reshape(batch, blocks, slots, width)

    def example(self) -> tuple:
        """What `init` traces."""
        c = self.config
        features = jnp.zeros((1, 2, len(c.target_layer_ids) * c.hidden_size))
        block = jnp.zeros((1, 1, c.block_size, c.hidden_size))
        slots = c.lead + c.num_drafts
        inputs = block[:, :, :slots] if c.reads_embeddings else jnp.zeros((1, 1, slots), jnp.int32)
        return features, block, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool), inputs

    def init_cache(self, batch: int, slots: int) -> Cache:
        """An empty context cache for `batch` rows of `slots` positions."""
        c = self.config
        return init_cache(c.num_hidden_layers, batch, slots, c.num_key_value_heads, c.head_dim, self.dtype)

    def extend_context(self, cache: Cache, text: TargetRows, slots: jax.Array) -> Cache:
        """Writes context keys and values of features [B, T, C·D] at cache slots (= absolute positions) int32 [B, T]."""
        rows = self.backbone.context_keys_values(text.features, slots)
        return tuple(append(layer, k, v, slots) for layer, (k, v) in zip(cache, rows, strict=True))

    def draft_hidden(
        self, cache: Cache, x: jax.Array, lengths: Lengths, window: int = 0, sink: int = 0
    ) -> tuple[Hidden, Cache]:
        """Block embeddings x [B, G, D] at positions length.. → (z [B, G, D], the cache).

        Every slot reads the committed context and its block as in training (`training_attention`). Layers without a
        window write the block after the length. These rows are never committed: the next `extend_context` overwrites
        them with the accepted tokens' features.

        Args:
            window: above 0, no layer reads further back than a sliding window of this size.
            sink: with a window, first rows of the text that layers without a window of their training read as well.
        """
        size = x.shape[1]
        positions = lengths[:, None] + jnp.arange(size)

        def attention(layer):
            trained = self.config.window(layer)
            windows = [rows for rows in (trained, window) if rows]
            readable = slots_read(size, trained, self.config.causal(layer))
            if windows:
                first = sink if trained is None else 0
                return attention_over_window(cache[layer], lengths, readable, min(windows), first)
            mask = block_mask(lengths, readable, slots_of(cache))

            def over_cache(q, k, v):
                written = append(cache[layer], k, v, positions)
                return attend_cache(q, *written, mask), written

            return over_cache

        return self.backbone(x, positions, attention)


def attention_over_window(
    cache: LayerCache, lengths: Lengths, readable: jax.Array, window: int, sink: int = 0
) -> Attention:
    """Attention of a block of G slots over the end of the text, its first `sink` rows, and the block itself.

    Slot j reads the committed rows from length + j - (window - 1) on. Only the rows that some slot reads are taken out
    of the cache, whose size then costs nothing; the cache stays as it is.

    Args:
        readable: bool [G, G], of slots_read.
    """
    size, slots = len(readable), cache[0].shape[2]
    count, sink = min(window - 1, slots), min(sink, slots)
    start = jnp.clip(lengths - count, 0, slots - count)
    places = start[:, None] + jnp.arange(count)
    reached = places[:, None] > (lengths[:, None] + jnp.arange(size))[..., None] - window
    recent = (places < lengths[:, None])[:, None] & (reached | (places < sink)[:, None])
    first = jnp.arange(sink) < start[:, None]  # those that are not among the recent ones
    shape = (len(lengths), size)
    mask = jnp.concatenate(
        [
            jnp.broadcast_to(first[:, None], (*shape, sink)),
            recent,
            jnp.broadcast_to(readable, (*shape, size)),
        ],
        axis=2,
    )

    def attention(q, k, v):
        def rows(cached, new):
            end = jax.vmap(lambda row, place: jax.lax.dynamic_slice_in_dim(row, place, count, axis=1))(cached, start)
            return jnp.concatenate([cached[:, :, :sink], end, new.astype(cached.dtype)], axis=2)

        return attend_cache(q, rows(cache[0], k), rows(cache[1], v), mask), cache

    return attention


def init_drafter_params(drafter: Any, key: jax.Array) -> dict:
    """Fresh float32 parameters of a drafter of any kind: normal(0, 0.02) linears, ones for norms, torch's uniform for
    the GRU, zeros for blocks that start as the identity."""
    return drafter.init(key, *drafter.example())["params"]


def rows_together(params: dict) -> dict:
    """A drafter's parameters as decoding stores them: the numbers of a token in the head's last matrix side by side.

    The shape stays [E, V]; the order in an accelerator's memory is that of [V, E], of which a draft reads the rows of
    its candidates (Head.rows). From the usual order the compiler for TPUs copies the whole matrix into this one
    in every round. On a CPU nothing changes.

    Args:
        params: arrays, or shapes with their shardings.
    """
    if "head" not in params:
        return params
    kernel = params["head"]["up"]["kernel"]
    if any(device.platform == "cpu" for device in kernel.sharding.device_set):
        return params
    return {**params, "head": {**params["head"], "up": {"kernel": transposed_in_memory(kernel)}}}


def transposed_in_memory(matrix: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
    """The same matrix with the numbers of a column side by side in memory."""
    stored = Format(Layout(major_to_minor=(1, 0)), matrix.sharding)
    if isinstance(matrix, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(matrix.shape, matrix.dtype, sharding=stored)
    return jax.device_put(matrix, stored)
