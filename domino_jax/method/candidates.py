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

    token_ids: int32 [B, M, Q], the target's; None: the whole vocabulary in its order, Q = V.
    logits: float32 [B, M, Q], their base logits.
    noise: float32 [B, M, Q], the target's for these tokens at their positions; None for a draft that shares none.
    vocab_ids: int32 [B, M, Q], places in the draft vocabulary, best first; None: all N in their order.
    """

    token_ids: jax.Array | None
    logits: jax.Array
    noise: jax.Array | None = None
    vocab_ids: jax.Array | None = None


def pick_candidates(base: Logits, count: int, draft_tokens: Sequence[int] = ()) -> Candidates:
    """The `count` likeliest tokens of each slot, from base logits float32 [B, M, N]; 0: all of them, as they are.

    draft_tokens: the N ids of a draft vocabulary; empty: all tokens.
    """
    logits, vocab_ids = largest(base, min(count, base.shape[-1])) if count else (base, None)
    if not len(draft_tokens):
        return Candidates(vocab_ids, logits, vocab_ids=vocab_ids)
    token_ids = jnp.asarray(draft_tokens)
    token_ids = jnp.broadcast_to(token_ids, base.shape) if vocab_ids is None else token_ids[vocab_ids]
    return Candidates(token_ids, logits, vocab_ids=vocab_ids)


def with_noise(candidates: Candidates, keys: jax.Array, positions: jax.Array, vocab: int) -> Candidates:
    """The candidates with the target's noise at absolute positions int32 [B, M]; keys [B], one per request."""
    noise = position_noise(keys, positions, vocab)
    if candidates.token_ids is not None:
        noise = jnp.take_along_axis(noise, candidates.token_ids, axis=-1)
    return candidates._replace(noise=noise)
