"""The draft of one round: backbone over [anchor, mask, …], base logits of all slots, then the head's rollout."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.method.candidates import Candidates, pick_candidates, with_noise
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Pair
from domino_jax.method.rollout import Drafted, choose_drafts, draft_in_passes, roll_out, scan_drafts
from domino_jax.method.sampling import Sampling, reads_noise
from domino_jax.method.settings import DraftSettings
from domino_jax.models.cache import Cache
from domino_jax.models.shapes import Hidden, Logits
from domino_jax.models.sharding import constrain


class Places(NamedTuple):
    """The part of a DecodeState that a draft reads besides the caches, for R rounds that begin at places of texts.

    anchors, before: the tokens there and before, [R].  lengths: the anchors' positions.  keys: of the requests' noise.
    """

    anchors: jax.Array
    before: jax.Array
    lengths: jax.Array
    keys: jax.Array | None


def propose(models: Pair, state: DecodeState, sampling: Sampling, settings: DraftSettings) -> tuple[jax.Array, Any]:
    """Draft tokens int32 [B, M], and the draft cache with the draft's rows after the committed length.

    Without drafts (num_drafts 0) no backbone runs.
    """
    if not models.drafter.config.has_backbone:
        return draft_chain(models, state, sampling, settings)
    if settings.num_drafts == 0:
        return jnp.zeros((len(state.anchors), 0), jnp.int32), state.draft_cache
    use_head = settings.use_head and models.drafter.config.has_head
    z, base, cache = draft_base(models, state, settings.num_drafts, use_head)
    if use_head:
        return roll_out_head(models, state, z, base, sampling, settings).tokens, cache
    candidates = slot_candidates(models, state, base, 0, sampling, settings)
    return choose_drafts(candidates, sampling, settings.draft_sharpness).tokens, cache


def draft_positions(at: DecodeState | Places, drafts: int) -> jax.Array:
    """Absolute positions int32 [B, M] of the drafts: the anchor is at `lengths`, draft i at lengths + i."""
    return at.lengths[:, None] + 1 + jnp.arange(drafts)


def draft_base(
    models: Pair,
    state: DecodeState,
    num_drafts: int | None = None,
    use_head: bool = True,
) -> tuple[Hidden, Logits, Cache]:
    """One backbone pass → (z [B, T, D] of the slots that the head sees, base logits float32 [B, M, N], the cache).

    Only the slots that predict a token go through the lm_head: all G shifted, the last G-1 unshifted, and of those the
    first `num_drafts`.
    """
    config = models.drafter.config
    masks = jnp.full((state.anchors.shape[0], config.block_size - 1), config.mask_token_id, jnp.int32)
    block = jnp.concatenate([state.anchors[:, None], masks], axis=1)
    z, cache = models.bound.draft_hidden(state.draft_cache, models.embed(block), state.lengths)
    z = z[:, config.first_slot - config.extra_slots :]
    return z, predicting_logits(models, z, num_drafts, use_head), cache


def predicting_logits(models: Pair, z: Hidden, num_drafts: int | None, use_head: bool) -> Logits:
    """Base logits float32 [B, M, N] of the first `num_drafts` slots that predict a token, of z [B, T, D]."""
    config = models.drafter.config
    # Split at first, so that the compiler never gathers the lm_head instead of its product.
    base = constrain(models.draft_logits(z[:, config.extra_slots :][:, :num_drafts]), "batch", None, "vocab")
    if use_head and config.has_head and models.drafter.whole_head:
        # A head that is whole on every device reads whole rows of logits, one after another: one exchange now is better
        # than one per draft. A split head reads only its share of them.
        base = constrain(base, "batch")
    return base


def slot_candidates(
    models: Pair, at: DecodeState | Places, base: Logits, count: int, sampling: Sampling, settings: DraftSettings
) -> Candidates:
    """`pick_candidates` of base logits float32 [B, M, N], with the target's noise where the drafts share it."""
    candidates = pick_candidates(base, count, models.drafter.config.draft_tokens)
    if not reads_noise(sampling, settings.draft_sharpness):
        return candidates
    vocab = models.target.config.vocab_size
    return with_noise(candidates, at.keys, draft_positions(at, base.shape[1]), vocab)


def roll_out_head(
    models: Pair,
    at: DecodeState | Places,
    z: Hidden,
    base: Logits,
    sampling: Sampling,
    settings: DraftSettings,
    choose: Callable[..., Drafted] = choose_drafts,
) -> Drafted:
    """The head's drafts from z [B, T, D] and base logits float32 [B, M, N], slot after slot or in passes.

    Draft i shares the target's noise at its absolute position, in every pass the same.
    """
    count = models.drafter.config.only_candidates or settings.head_candidates
    candidates = slot_candidates(models, at, base, count, sampling, settings)
    choose = functools.partial(choose, sampling=sampling, sharpness=settings.draft_sharpness)
    prefix, passes = read_prefix(models, at), settings.head_passes or models.drafter.config.passes
    if passes:
        return draft_in_passes(models, prefix, z, candidates, passes, choose)
    return roll_out(models, prefix, z, candidates, choose)


def read_prefix(models: Pair, at: DecodeState | Places) -> jax.Array:
    """The prefix tokens int32 [B, 1 + extra_slots]: the anchor, and the token before it where the head reads that."""
    tokens = jnp.stack([at.before, at.anchors], axis=1)
    return tokens[:, 1 - models.drafter.config.extra_slots :]


def draft_chain(models: Pair, state: DecodeState, sampling: Sampling, settings: DraftSettings) -> tuple[jax.Array, Any]:
    """`propose` without a backbone: the layer runs once per draft, on the anchor, then on each draft but the last.

    Without drafts it writes the anchor's row all the same, whose token was not known when the prompt was read.
    """
    drafts = settings.width(models.drafter.config)

    def step(carry, index):
        rows, hidden, token = carry
        here = state.replace(lengths=state.lengths + index)
        logits, hidden, rows = models.bound.draft_step(rows, hidden, models.embed(token), here.lengths - 1)
        candidates = slot_candidates(models, here, logits[:, None], 0, sampling, settings)
        token = choose_drafts(candidates, sampling, settings.draft_sharpness).tokens[:, 0]
        return (rows, hidden, token), token

    start = (*state.draft_cache, state.anchors)
    (rows, _, _), drafted = scan_drafts(step, start, jnp.arange(max(drafts, 1)))
    return drafted.T[:, :drafts], (rows, state.draft_cache[1])
