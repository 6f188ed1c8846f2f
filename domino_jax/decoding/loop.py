"""The state of a generation: how it starts, emits tokens, and runs rounds in one while_loop."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from domino_jax.decoding.sampling import RowSampling, Sampling, choose
from domino_jax.drafters.pair import Models
from domino_jax.models.cache import Cache


@flax.struct.dataclass
class DecodeState:
    """One batch of generations in flight. Letters: B rows, O slots of the token buffer.

    target_cache, draft_cache: keys and values; draft_cache is () without a drafter.
    lengths: int32 [B], committed rows of both caches = absolute position of the anchor.
    anchors: int32 [B], last chosen token, not yet in the caches.
    keys: [B], noise keys of the requests.           limits: int32 [B], most tokens to emit (max_new_tokens).
    tokens: int32 [B, O], emitted so far.            counts: int32 [B], how many.
    accepts: int32 [B, O], tokens emitted per round. rounds: int32 [B], how many rounds.
    done: bool [B]; a finished row is computed along but never advances.
    sampling: of each row, where the requests differ; None where all sample alike.
    """

    target_cache: Cache
    draft_cache: Cache
    lengths: jax.Array
    anchors: jax.Array
    keys: jax.Array
    limits: jax.Array
    tokens: jax.Array
    counts: jax.Array
    accepts: jax.Array
    rounds: jax.Array
    done: jax.Array
    sampling: RowSampling | None = None


def emit(state: DecodeState, tokens: jax.Array, count: jax.Array, stop_ids: jax.Array) -> tuple[DecodeState, jax.Array]:
    """Appends the first `count` int32 [B] of tokens int32 [B, T] to every unfinished row, cut at stop id and limit.

    Returns the state and the number of tokens kept per row. A row is done after a stop id (kept) or at its limit.
    """
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == stop_ids).any(-1) & (index < count[:, None])
    first_stop = jnp.where(is_stop.any(1), jnp.argmax(is_stop, axis=1) + 1, tokens.shape[1] + 1)
    kept = jnp.minimum(jnp.minimum(count, first_stop), state.limits - state.counts)
    stopped = first_stop <= kept
    kept = jnp.where(state.done, 0, kept)
    rows = jnp.arange(tokens.shape[0])
    # Positions past `kept` point outside the buffer, where the scatter drops them.
    where = jnp.where(index < kept[:, None], state.counts[:, None] + index, state.tokens.shape[1])
    counts = state.counts + kept
    last = tokens[rows, jnp.maximum(kept - 1, 0)]
    state = state.replace(
        tokens=state.tokens.at[rows[:, None], where].set(tokens, mode="drop"),
        counts=counts,
        anchors=jnp.where(kept > 0, last, state.anchors),
        done=state.done | stopped | (counts >= state.limits),
    )
    return state, kept


def record_round(state: DecodeState, kept: jax.Array) -> DecodeState:
    """Counts a round that emitted `kept` int32 [B] tokens; rows that emitted none (finished before) record nothing."""
    rows = jnp.arange(kept.shape[0])
    where = jnp.where(kept > 0, state.rounds, state.accepts.shape[1])
    return state.replace(accepts=state.accepts.at[rows, where].set(kept, mode="drop"), rounds=state.rounds + (kept > 0))


def prefill(
    models: Models,
    prompts: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    keys: jax.Array,
    stop_ids: jax.Array,
    *,
    cache_slots: int,
    buffer: int,
    sampling: Sampling,
) -> DecodeState:
    """Runs prompts int32 [B, P] (right-padded, true lengths int32 [B]) and emits each row's first token.

    Padding writes rows after a prompt's end. They are past its length, so nothing reads them before they are
    overwritten. Only the last true row goes through the lm_head. Attention runs over the P tokens and not over the
    cache, a slice of queries at a time: over all of 448 slots a prefill of 16 × 256 rows took 1.6 × as long.
    """
    batch, padded = prompts.shape
    slots = jnp.broadcast_to(jnp.arange(padded), prompts.shape)
    taps = models.drafter.config.target_layer_ids if models.drafter else ()
    empty = models.target.init_cache(batch, cache_slots)
    out = models.run_target(prompts, slots, cache=empty, slots=slots, tap_layers=taps, with_logits=False)
    last = jnp.take_along_axis(out["hidden"], (lengths - 1)[:, None, None], axis=1)
    first = choose(models.unembed(last), keys, lengths[:, None], sampling)
    draft_cache = ()
    if models.drafter:
        empty = models.drafter.init_cache(batch, cache_slots)
        draft_cache = models.extend_context(empty, out["features"], slots)
    state = DecodeState(
        target_cache=out["cache"],
        draft_cache=draft_cache,
        lengths=lengths,
        anchors=jnp.zeros_like(lengths),
        keys=keys,
        limits=limits,
        tokens=jnp.zeros((batch, buffer), jnp.int32),
        counts=jnp.zeros_like(lengths),
        accepts=jnp.zeros((batch, buffer), jnp.int32),
        rounds=jnp.zeros_like(lengths),
        done=jnp.zeros_like(lengths, bool),
        sampling=sampling if isinstance(sampling, RowSampling) else None,
    )
    return emit(state, first, jnp.ones_like(lengths), stop_ids)[0]


def run_rounds(
    round_: Callable[[Any], Any], state: DecodeState, max_rounds: jax.Array, idle: jax.Array | None = None
) -> DecodeState:
    """Applies `round_` for `max_rounds` rounds, or until more than `idle` rows are done: one loop, no host read.

    Both are traced int32 scalars. idle None is B - 1: until all rows are done. With the number of rows that are free
    already the loop ends as soon as one more is done, so that its slot can go to the next request.
    """
    idle = state.done.shape[0] - 1 if idle is None else idle

    def unfinished(carry):
        count, state = carry
        return (count < max_rounds) & (state.done.sum() <= idle)

    return jax.lax.while_loop(unfinished, lambda carry: (carry[0] + 1, round_(carry[1])), (jnp.int32(0), state))[1]


def put_row(state: DecodeState, row: DecodeState, slot: jax.Array) -> DecodeState:
    """The state with the batch of one in `row` at place `slot` (traced int32): a new request where one has ended."""
    return jax.tree.map(lambda rows, one: rows.at[slot].set(one[0]), state, row)
