"""The target's pass over a draft block, and which of its tokens are accepted (docs/method.md).

A block is a tree in general: tokens, depths and an ancestor table; a chain is the lower triangle.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.method.pair import Pair
from domino_jax.models.cache import Cache, block_mask
from domino_jax.models.shapes import Features, Lengths, Logits


class Tree(NamedTuple):
    """Nodes in an order that has parents before children; node 0 is the root.

    tokens: int32 [B, T].  depths: int32 [B, T], 0 for the root and for a place that no draft fills.
    parents: int32 [B, T], 0 for the root and for places that no draft fills.
    ancestors: bool [B, T, T], ancestors[i, j] when node j is i or above it.
    """

    tokens: jax.Array
    depths: jax.Array
    parents: jax.Array
    ancestors: jax.Array


class Verified(NamedTuple):
    """logits float32 [B, T, V]; features [B, T, C·D], None of plain decoding; cache with the block's rows after the
    length."""

    logits: Logits
    features: Features | None
    cache: Cache


def verify(
    models: Pair,
    cache: Cache,
    tokens: jax.Array,
    lengths: Lengths,
    *,
    depths: jax.Array | None = None,
    ancestors: jax.Array | None = None,
    tap_layers: tuple[int, ...] = (),
    isolated: bool = False,
) -> Verified:
    """One pass over block tokens int32 [B, T], row 0 the anchor.

    Args:
        depths: int32 [B, T], distance from the anchor; 0..T-1 (a chain) when absent.
        ancestors: bool [B, T, T], as of Tree; the lower triangle when absent.
        isolated: keep the compiler from fusing the pass with the code around it, so that two programs with a pass of
            this shape round alike, to the last bit (fixed-shape parity).
    """
    if isolated:
        cache, tokens, lengths = jax.lax.optimization_barrier((cache, tokens, lengths))
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
    verified = Verified(out["logits"], out.get("features"), out["cache"])
    return jax.lax.optimization_barrier(verified) if isolated else verified


def accept_chain(tokens: jax.Array, chosen: jax.Array) -> jax.Array:
    """Accepted drafts per row, int32 [B]: the leading run with draft i+1 equal to the target's choice after row i.

    tokens int32 [B, T] = [anchor, drafts]; chosen int32 [B, T] = the target's choice after each row. The round emits
    chosen[:, :accepted+1]: the accepted drafts and the choice after the last one.
    """
    matches = (tokens[:, 1:] == chosen[:, :-1]).astype(jnp.int32)
    return jnp.cumprod(matches, axis=1).sum(axis=1)


def accept_tree(tree: Tree, chosen: jax.Array, deepest: int) -> tuple[jax.Array, jax.Array]:
    """(accepted drafts int32 [B], path int32 [B, deepest+1]): path[k] is the accepted node at depth k, k ≤ accepted.

    A node is accepted when its token is the target's choice after its parent and all nodes above it are accepted.
    Siblings differ, so the accepted nodes form one path. Past `accepted` the path is arbitrary. chosen int32 [B, T] =
    the target's choice after each node.
    """
    is_root = jnp.arange(tree.tokens.shape[1]) == 0
    matches = (tree.depths > 0) & (tree.tokens == jnp.take_along_axis(chosen, tree.parents, axis=1))
    accepted = ~(tree.ancestors & ~(matches | is_root)[:, None, :]).any(-1)
    at_depth = accepted[:, None, :] & (tree.depths[:, None, :] == jnp.arange(deepest + 1)[:, None])
    return jnp.where(accepted, tree.depths, 0).max(axis=1), jnp.argmax(at_depth, axis=2).astype(jnp.int32)
