"""The tokens that a draft chooses among: all of them, or at each slot the few with the largest base logits.

A token that the backbone ranks far down is hardly ever the best one after the head's correction. So chains and trees
may correct Q candidates per slot, and read Q rows of the head's matrix [V, E]. With a draft vocabulary the matrices
have the columns of its N tokens alone. The verifying pass decides about every draft, so neither changes the text.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.method.sampling import largest, position_noise
from domino_jax.models.shapes import Logits


class Candidates(NamedTuple):
    """The choices at each of M slots. Letters: N tokens that can be drafted, all V without a draft vocabulary.

    tokens: int32 [B, M, Q]; None: the whole vocabulary in its order, Q = V.
    logits: float32 [B, M, Q], their base logits.
    noise: float32 [B, M, Q], the target's for these tokens at their positions; None for a draft that shares none.
    columns: int32 [B, M, Q], best first, of the head's last matrix [E, N]; None: all N in their order.
    """

    tokens: jax.Array | None
    logits: jax.Array
    noise: jax.Array | None = None
    columns: jax.Array | None = None


def pick_candidates(base: Logits, count: int, draft_tokens: Sequence[int] = ()) -> Candidates:
    """The `count` likeliest tokens of each slot, from base logits float32 [B, M, N]; 0: all of them, as they are.

    draft_tokens: the N ids of a draft vocabulary; empty: all tokens.
    """
    logits, columns = largest(base, min(count, base.shape[-1])) if count else (base, None)
    if not len(draft_tokens):
        return Candidates(columns, logits, columns=columns)
    tokens = jnp.asarray(draft_tokens)
    tokens = jnp.broadcast_to(tokens, base.shape) if columns is None else tokens[columns]
    return Candidates(tokens, logits, columns=columns)


def with_noise(candidates: Candidates, keys: jax.Array, positions: jax.Array, vocab: int) -> Candidates:
    """The candidates with the target's noise at absolute positions int32 [B, M]; keys [B], one per request."""
    noise = position_noise(keys, positions, vocab)
    if candidates.tokens is not None:
        noise = jnp.take_along_axis(noise, candidates.tokens, axis=-1)
    return candidates._replace(noise=noise)
