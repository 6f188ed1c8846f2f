"""Plain decoding, one token per target pass: the yardstick of every speed-up, and the text to equal."""

import jax
import jax.numpy as jnp

from domino_jax.decoding.loop import DecodeState, emit
from domino_jax.decoding.models import Models
from domino_jax.decoding.sampling import SamplingParams, choose
from domino_jax.decoding.verify import verify


def autoregressive_round(
    models: Models, state: DecodeState, stop_ids: jax.Array, sampling: SamplingParams
) -> DecodeState:
    """The anchor in, the target's next choice out; one cache row committed."""
    out = verify(models, state.target_cache, state.anchors[:, None], state.lengths)
    chosen = choose(out.logits, state.keys, state.lengths[:, None] + 1, sampling)
    state = state.replace(target_cache=out.cache)
    state, kept = emit(state, chosen, jnp.ones_like(state.lengths), stop_ids)
    return state.replace(lengths=state.lengths + kept)
