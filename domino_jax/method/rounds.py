"""One round, with nothing read by the host: propose → verify → accept → commit, or one plain step."""

from typing import Any

import jax
import jax.numpy as jnp

from domino_jax.method.loop import DecodeState, emit, record_round
from domino_jax.method.pair import Pair, TargetRows
from domino_jax.method.propose import draft_positions, propose
from domino_jax.method.sampling import Sampling, choose
from domino_jax.method.settings import DraftSettings
from domino_jax.method.tree import propose_tree
from domino_jax.method.verify import Verified, accept_chain, accept_tree, verify
from domino_jax.models.cache import keep_path


def autoregressive_round(
    models: Pair,
    state: DecodeState,
    stop_ids: jax.Array,
    sampling: Sampling,
    fixed_width: int | None = None,
) -> DecodeState:
    """Plain decoding, the reference for text and speed: the anchor in, the target's next choice out.

    Args:
        fixed_width: rows of the pass, the number that a speculative round has; the first alone is valid, so that
            the choice is equal to the round's to the last bit (fixed-shape parity). One row when None.
    """
    tokens = jnp.broadcast_to(state.anchors[:, None], (state.anchors.shape[0], fixed_width or 1))
    taps = models.drafter.config.target_layer_ids if fixed_width else ()
    out = verify(models, state.target_cache, tokens, state.lengths, tap_layers=taps, isolated=fixed_width is not None)
    sampling, positions = state.sampling or sampling, state.lengths[:, None] + 1
    chosen = choose(out.logits[:, :1], state.keys, positions, sampling, stop_ids=stop_ids)
    state = state.replace(target_cache=out.cache)
    state, emitted = emit(state, chosen, jnp.ones_like(state.lengths), stop_ids)
    return state.replace(lengths=state.lengths + emitted)


def speculative_round(
    models: Pair,
    state: DecodeState,
    stop_ids: jax.Array,
    sampling: Sampling,
    settings: DraftSettings,
    *,
    isolated: bool = False,
) -> DecodeState:
    """One round for every row: up to M+1 tokens emitted, the same number of cache rows committed.

    Args:
        isolated: verify as a wide plain step does, to the last bit (fixed-shape parity).
    """
    config, sampling = models.drafter.config, state.sampling or sampling
    # 1) Propose a tree or a chain.
    if settings.tree:
        tree, draft_cache = propose_tree(models, state, sampling, settings)
        tokens, depths, ancestors = tree.tokens, tree.depths, tree.ancestors
        deepest = settings.width(config)
    else:
        drafts, draft_cache = propose(models, state, sampling, settings)
        tokens = jnp.concatenate([state.anchors[:, None], drafts], axis=1)
        depths = ancestors = None  # a chain's
        deepest = drafts.shape[1]
    # 2) Verify it in one pass of the target.
    shape = {"depths": depths, "ancestors": ancestors, "isolated": isolated}
    out = verify(models, state.target_cache, tokens, state.lengths, tap_layers=config.target_layer_ids, **shape)
    # 3) Accept the drafts that equal the target's choices.
    positions = draft_positions(state, deepest + 1)
    chosen = choose(out.logits, state.keys, positions, sampling, depths, stop_ids)
    if settings.tree:
        # The accepted path is moved to where a chain would be.
        accepted, path = accept_tree(tree, chosen, deepest)
        features = jnp.take_along_axis(out.features, path[:, :, None], axis=1)
        out = out._replace(features=features, cache=keep_path(out.cache, state.lengths, path, tokens.shape[1]))
        chosen = jnp.take_along_axis(chosen, path, axis=1)
    else:
        accepted = accept_chain(tokens, chosen)
    # 4) Commit them.
    after = commit(models, state, out, draft_cache, chosen, accepted, stop_ids)
    # Rows that were finished before have drafted nothing.
    return after.replace(drafted=state.drafted + (tokens.shape[1] - 1) * (after.rounds - state.rounds))


def commit(
    models: Pair,
    state: DecodeState,
    out: Verified,
    draft_cache: Any,
    chosen: jax.Array,
    accepted: jax.Array,
    stop_ids: jax.Array,
) -> DecodeState:
    """Emits the first accepted+1 of chosen int32 [B, M+1] and extends both caches by them.

    out: features and cache with a chain's rows, at depths 0..M, right after the committed length.
    """
    positions = draft_positions(state, chosen.shape[1])
    # Features of rejected rows may be written too: after the new length, and overwritten before they can be read.
    text = TargetRows(out.features, models.embed(chosen), accepted + 1)
    context = models.bound.extend_context(draft_cache, text, positions - 1)
    state = state.replace(target_cache=out.cache, draft_cache=context)
    state, emitted = emit(state, chosen, accepted + 1, stop_ids)
    return record_round(state.replace(lengths=state.lengths + emitted), emitted)
