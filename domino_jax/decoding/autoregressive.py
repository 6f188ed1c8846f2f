"""Plain decoding, one token per target pass: the yardstick that speed-ups are measured against, and the text to equal."""

import jax
import jax.numpy as jnp

from domino_jax.decoding.loop import DecodeState, emit
from domino_jax.decoding.sampling import SamplingParams, choose
from domino_jax.decoding.verify import verify
from domino_jax.target.qwen3 import Qwen3


def autoregressive_round(
    target: Qwen3, target_params: dict, state: DecodeState, stop_ids: jax.Array, sampling: SamplingParams
) -> DecodeState:
    """The anchor in, the target's next choice out; one cache row committed."""
    out = verify(target, target_params, state.target_cache, state.anchors[:, None], state.lengths)
    chosen = choose(out.logits, state.keys, state.lengths[:, None] + 1, sampling)
    state = state.replace(target_cache=out.cache)
    state, kept = emit(state, chosen, jnp.ones_like(state.lengths), stop_ids)
    return state.replace(lengths=state.lengths + kept)
