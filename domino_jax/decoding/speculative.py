"""One round of speculative decoding: propose → verify → accept → commit, with nothing read by the host (DESIGN §5)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.decoding.loop import DecodeState, emit, record_round
from domino_jax.decoding.propose import DraftSettings, draft_positions, propose
from domino_jax.decoding.sampling import Sampling, choose
from domino_jax.decoding.tree import Tree, propose_tree
from domino_jax.decoding.verify import Verified, accept_chain, accept_tree, verify
from domino_jax.drafters.pair import Models
from domino_jax.models.cache import Cache, keep_path


def speculative_round(
    models: Models,
    state: DecodeState,
    stop_ids: jax.Array,
    sampling: Sampling,
    settings: DraftSettings,
    *,
    isolated: bool = False,
    simulated_tau: float | None = None,
) -> DecodeState:
    """One round for every row: up to M+1 tokens emitted, as many cache rows committed.

    Args:
        isolated: verify as a wide plain step does, to the last bit (fixed-shape parity).
        simulated_tau: accept by `simulated_accepts` instead of by the rule: for the speed of a shape, not for text.
    """
    sampling = state.sampling or sampling
    if settings.tree:
        return tree_round(models, state, stop_ids, sampling, settings, simulated_tau=simulated_tau)[0]
    drafts, draft_cache = propose(models, state, sampling, settings)
    tokens = jnp.concatenate([state.anchors[:, None], drafts], axis=1)
    taps = models.drafter.config.target_layer_ids
    out = verify(models, state.target_cache, tokens, state.lengths, tap_layers=taps, isolated=isolated)
    positions = draft_positions(state, tokens.shape[1])
    chosen = choose(out.logits, state.keys, positions, sampling)
    accepted = accept_chain(tokens, chosen)
    if simulated_tau is not None:
        accepted = simulated_accepts(state.rounds, simulated_tau, drafts.shape[1])
    return commit(models, state, out, draft_cache, chosen, accepted, stop_ids)


def tree_round(
    models: Models,
    state: DecodeState,
    stop_ids: jax.Array,
    sampling: Sampling,
    settings: DraftSettings,
    *,
    simulated_tau: float | None = None,
) -> tuple[DecodeState, "TreeRound"]:
    """The round of a tree: what stands of it is moved to where a chain would stand, and then committed as a chain is.

    Also what was drafted and what stands of it, for a recording; a program that drops it does not compute it.
    """
    tree, draft_cache = propose_tree(models, state, sampling, settings)
    taps = models.drafter.config.target_layer_ids
    shape = {"depths": tree.depths, "ancestors": tree.ancestors}
    out = verify(models, state.target_cache, tree.tokens, state.lengths, tap_layers=taps, **shape)
    deepest = settings.width(models.drafter.config)
    positions = draft_positions(state, deepest + 1)
    chosen = choose(out.logits, state.keys, positions, sampling, depths=tree.depths)
    accepted, path = accept_tree(tree.tokens, chosen, tree.depths, tree.parents, tree.ancestors, deepest)
    if simulated_tau is not None:
        accepted = simulated_accepts(state.rounds, simulated_tau, deepest)
    out = Verified(
        out.logits,
        jnp.take_along_axis(out.features, path[:, :, None], axis=1),
        keep_path(out.cache, state.lengths, path, tree.tokens.shape[1]),
    )
    emitted = jnp.take_along_axis(chosen, path, axis=1)
    after = commit(models, state, out, draft_cache, emitted, accepted, stop_ids)
    return after, TreeRound(tree, chosen, accepted, path)


class TreeRound(NamedTuple):
    """tree; the target's choice after each node int32 [B, T]; accepted int32 [B] and path int32 [B, M+1] of it."""

    tree: Tree
    chosen: jax.Array
    accepted: jax.Array
    path: jax.Array


def commit(
    models: Models,
    state: DecodeState,
    out: Verified,
    draft_cache: Cache,
    chosen: jax.Array,
    accepted: jax.Array,
    stop_ids: jax.Array,
) -> DecodeState:
    """Emits the first accepted+1 of chosen int32 [B, M+1] and lets both caches follow them.

    out: features and cache with a chain's rows, at depths 0..M, right behind the committed length.
    """
    positions = draft_positions(state, chosen.shape[1])
    # Features of rejected rows are written too; they lie behind the new length and are overwritten before they can be
    # read.
    context = models.run_drafter("extend_context", draft_cache, out.features, positions - 1)
    state = state.replace(target_cache=out.cache, draft_cache=context)
    state, kept = emit(state, chosen, accepted + 1, stop_ids)
    return record_round(state.replace(lengths=state.lengths + kept), kept)


def simulated_accepts(rounds: jax.Array, tau: float, drafts: int) -> jax.Array:
    """Drafts int32 [B] that a row's round number `rounds` int32 [B] is made to accept, so that the mean is tau - 1.

    >>> tau 2.5, rounds 0 1 2 3  →  1 2 1 2
    """
    emitted = jnp.floor((rounds + 1) * tau) - jnp.floor(rounds * tau)
    return jnp.clip(emitted.astype(jnp.int32) - 1, 0, drafts)
