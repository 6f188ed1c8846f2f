"""One round of speculative decoding: propose → verify → accept → commit, with nothing read by the host (DESIGN §5)."""

import jax
import jax.numpy as jnp

from domino_jax.decoding.loop import DecodeState, emit, record_round
from domino_jax.decoding.models import Models
from domino_jax.decoding.propose import DraftSettings, draft_positions, propose
from domino_jax.decoding.sampling import SamplingParams, choose
from domino_jax.decoding.verify import accept_chain, verify


def speculative_round(
    models: Models, state: DecodeState, stop_ids: jax.Array, sampling: SamplingParams, settings: DraftSettings
) -> DecodeState:
    """One round for every row: up to M+1 tokens emitted, as many cache rows committed."""
    drafts, draft_cache = propose(models, state, sampling, settings)
    tokens = jnp.concatenate([state.anchors[:, None], drafts], axis=1)
    taps = models.drafter.config.target_layer_ids
    out = verify(models, state.target_cache, tokens, state.lengths, tap_layers=taps)
    positions = draft_positions(state, tokens.shape[1])
    chosen = choose(out.logits, state.keys, positions, sampling)
    accepted = accept_chain(tokens, chosen)
    # Features of rejected rows are written too; they lie behind the new length and are overwritten before they can be
    # read.
    context = models.run_drafter("extend_context", draft_cache, out.features, positions - 1)
    state = state.replace(target_cache=out.cache, draft_cache=context)
    state, kept = emit(state, chosen, accepted + 1, stop_ids)
    return record_round(state.replace(lengths=state.lengths + kept), kept)
