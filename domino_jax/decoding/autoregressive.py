"""Plain decoding, one token per target pass: the yardstick of every speed-up, and the text to equal."""

import jax
import jax.numpy as jnp

from domino_jax.decoding.loop import DecodeState, emit
from domino_jax.decoding.sampling import Sampling, choose
from domino_jax.decoding.verify import verify
from domino_jax.drafters.pair import Models


def autoregressive_round(
    models: Models,
    state: DecodeState,
    stop_ids: jax.Array,
    sampling: Sampling,
    fixed_width: int | None = None,
) -> DecodeState:
    """The anchor in, the target's next choice out; one cache row committed.

    Args:
        fixed_width: rows of the pass, of which the first alone is valid: those of a speculative round, so that the
            choice is the round's to the last bit (fixed-shape parity, DESIGN §1.8). One row when absent.
    """
    tokens = jnp.broadcast_to(state.anchors[:, None], (state.anchors.shape[0], fixed_width or 1))
    taps = models.drafter.config.target_layer_ids if fixed_width else ()
    out = verify(models, state.target_cache, tokens, state.lengths, tap_layers=taps, isolated=fixed_width is not None)
    chosen = choose(out.logits[:, :1], state.keys, state.lengths[:, None] + 1, state.sampling or sampling)
    state = state.replace(target_cache=out.cache)
    state, kept = emit(state, chosen, jnp.ones_like(state.lengths), stop_ids)
    return state.replace(lengths=state.lengths + kept)
