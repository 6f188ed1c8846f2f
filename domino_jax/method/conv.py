"""DFlash2's grouped dynamic convolution: short causal filters over the slots of a block, around attention and MLP.

A filter has a fixed part for each channel and a part for each group of channels that the layer's normed input decides.
Both start as the identity, so a new drafter begins as one without convolutions. The formulas are in docs/heads.md.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.method.config import DrafterConfig
from domino_jax.models.decoder_layer import Angles, Attention, DecoderLayer
from domino_jax.models.layers import Linear
from domino_jax.models.sharding import constrain

INPUT, OUTPUT = 0, 1  # the sides of a convolved part: what goes in, and what comes out


class GroupedConvolution(nn.Module):
    """The filters of both sides of one part of a layer.

    Letters: P taps, W channels of a group, Z groups (D = Z·W).
    """

    config: DrafterConfig
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        self.base_kernel = self.param("base_kernel", _first_tap, (2, c.conv_kernel_size, c.hidden_size))
        self.groups = c.hidden_size // c.conv_group_size
        width = 2 * c.conv_kernel_size * self.groups
        self.kernel_projection = Linear(width, dtype=self.dtype, kernel_init=nn.initializers.zeros)

    def filters(self, u: jax.Array) -> jax.Array:
        """The part that inputs u [B, T, D] decide, for both sides: [B, T, 2, P, Z]."""
        c = self.config
        return self.kernel_projection(u).reshape(*u.shape[:2], 2, c.conv_kernel_size, self.groups)

    def __call__(self, x: jax.Array, filters: jax.Array, side: int) -> jax.Array:
        """x [B, T, D] convolved inside each block; the T rows are whole blocks, one after another.

        y[i, c] = Σ_t (base[t, c] + filters[i, t, group of c]) · x[i-t, c], without terms before the block's slot 0.
        """
        c = self.config
        in_blocks = (x.shape[0], -1, c.block_size)
        x = x.reshape(*in_blocks, self.groups, c.conv_group_size)
        filters = filters[:, :, side].reshape(*in_blocks, c.conv_kernel_size, self.groups, 1)
        base = self.base_kernel[side].astype(self.dtype).reshape(-1, *x.shape[3:])
        y = jnp.zeros_like(x)
        for tap in range(c.conv_kernel_size):
            earlier = jnp.pad(x, ((0, 0), (0, 0), (tap, 0), (0, 0), (0, 0)))[:, :, : c.block_size]
            y += (base[tap] + filters[:, :, :, tap]) * earlier
        return y.reshape(y.shape[0], -1, c.hidden_size)


def _first_tap(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """1 at tap 0 and 0 at the others: the identity."""
    return jnp.zeros(shape, dtype).at[:, 0].set(1.0)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer of the backbone with convolutions before and after attention and MLP.

    It convolves rows of blocks only, and makes keys and values of the context as a plain layer does.
    """

    config: DrafterConfig

    def setup(self):
        super().setup()
        self.attention_conv = GroupedConvolution(self.config, self.dtype)
        self.mlp_conv = GroupedConvolution(self.config, self.dtype)

    def __call__(self, x: jax.Array, angles: Angles, attention: Attention) -> tuple[jax.Array, Any]:
        """x [B, T, D], T rows of whole blocks → (x [B, T, D], the second result of `attention`)."""
        u = self.input_layernorm(x)
        filters = self.attention_conv.filters(u)  # of the rows before the convolution, for both sides
        attended, extra = self.self_attn(self.attention_conv(u, filters, INPUT), angles, attention)
        x = constrain(x + self.attention_conv(attended, filters, OUTPUT), "batch")
        u = self.post_attention_layernorm(x)
        filters = self.mlp_conv.filters(u)
        y = self.mlp_conv(self.mlp(self.mlp_conv(u, filters, INPUT)), filters, OUTPUT)
        return constrain(x + y, "batch"), extra
