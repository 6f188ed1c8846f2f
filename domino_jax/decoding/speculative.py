"""One round of speculative decoding: propose → verify → accept → commit, with nothing read by the host (DESIGN §5)."""

import jax
import jax.numpy as jnp

from domino_jax.decoding.loop import DecodeState, emit, record_round
from domino_jax.decoding.propose import draft_base, roll_out_head
from domino_jax.decoding.sampling import SamplingParams, choose
from domino_jax.decoding.verify import accept_chain, verify
from domino_jax.drafter.model import Drafter
from domino_jax.target.qwen3 import Qwen3


def speculative_round(
    target: Qwen3,
    target_params: dict,
    drafter: Drafter,
    drafter_params: dict,
    state: DecodeState,
    stop_ids: jax.Array,
    sampling: SamplingParams,
    *,
    use_head: bool,
    scale: float,
) -> DecodeState:
    """One round for every row. use_head False drafts from base logits alone (a DFlash drafter, or the ablation)."""
    drafts, draft_cache = propose(
        target, target_params, drafter, drafter_params, state, sampling, use_head=use_head, scale=scale
    )
    tokens = jnp.concatenate([state.anchors[:, None], drafts], axis=1)
    out = verify(
        target,
        target_params,
        state.target_cache,
        tokens,
        state.lengths,
        tap_layers=drafter.config.target_layer_ids,
    )
    positions = state.lengths[:, None] + 1 + jnp.arange(tokens.shape[1])
    chosen = choose(out.logits, state.keys, positions, sampling)
    accepted = accept_chain(tokens, chosen)
    state = state.replace(
        target_cache=out.cache,
        draft_cache=drafter.apply(
            {"params": drafter_params}, draft_cache, out.features, positions - 1, method="extend_context"
        ),
    )
    state, kept = emit(state, chosen, accepted + 1, stop_ids)
    return record_round(state.replace(lengths=state.lengths + kept), kept)


def propose(
    target: Qwen3,
    target_params: dict,
    drafter: Drafter,
    drafter_params: dict,
    state: DecodeState,
    sampling: SamplingParams,
    *,
    use_head: bool,
    scale: float,
):
    """Draft tokens int32 [B, M] and the draft cache with the block's rows behind the committed length."""
    z, base, draft_cache = draft_base(
        target, target_params, drafter, drafter_params, state.draft_cache, state.anchors, state.lengths
    )
    if use_head:
        drafts = roll_out_head(
            target,
            target_params,
            drafter,
            drafter_params,
            z,
            base,
            state.anchors,
            state.lengths,
            state.keys,
            sampling,
            scale,
        )
    else:
        positions = state.lengths[:, None] + 1 + jnp.arange(base.shape[1])
        drafts = choose(base, state.keys, positions, sampling, scale)
    return drafts, draft_cache
