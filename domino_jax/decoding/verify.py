"""The target's pass over a draft block, and which of its tokens stand (DESIGN §4).

A block is a tree in general: tokens, depths and an ancestor table; a chain is the lower triangle.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.decoding.models import Models
from domino_jax.nn.cache import Cache, block_mask
from domino_jax.shapes import Features, Lengths, Logits


class Verified(NamedTuple):
    """logits float32 [B, T, V]; features [B, T, C·D] or None; cache with the block's rows behind the length."""

    logits: Logits
    features: Features | None
    cache: Cache


def verify(
    models: Models,
    cache: Cache,
    tokens: jax.Array,
    lengths: Lengths,
    *,
    depths: jax.Array | None = None,
    ancestors: jax.Array | None = None,
    tap_layers: tuple[int, ...] = (),
) -> Verified:
    """One pass over block tokens int32 [B, T], row 0 the anchor.

    Args:
        depths: int32 [B, T] or [T], distance from the anchor; 0..T-1 (a chain) when absent.
        ancestors: bool [B, T, T] or [T, T], ancestors[i, j] when j is i or above it; the lower triangle when absent.
    """
    size = tokens.shape[1]
    index = jnp.arange(size)
    depths = index if depths is None else depths
    ancestors = jnp.tril(jnp.ones((size, size), bool)) if ancestors is None else ancestors
    out = models.run_target(
        tokens,
        lengths[:, None] + depths,
        block_mask(lengths, ancestors, cache[0][0].shape[2]),
        cache,
        lengths[:, None] + index,
        tap_layers=tap_layers,
    )
    return Verified(out["logits"], out.get("features"), out["cache"])


def accept_chain(tokens: jax.Array, chosen: jax.Array) -> jax.Array:
    """Accepted drafts per row, int32 [B]: the leading run with draft i+1 equal to the target's choice after row i.

    tokens int32 [B, T] = [anchor, drafts]; chosen int32 [B, T] = the target's choice after each row. What is emitted is
    chosen[:, :accepted+1]: the accepted drafts, equal to the choices before them, and the choice after the last one.
    """
    matches = (tokens[:, 1:] == chosen[:, :-1]).astype(jnp.int32)
    return jnp.cumprod(matches, axis=1).sum(axis=1)
