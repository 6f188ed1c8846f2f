"""The state of a generation: how it starts, emits tokens, and runs rounds in one while_loop."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from domino_jax.method.pair import Pair, TargetRows
from domino_jax.method.sampling import RowSampling, Sampling, choose
from domino_jax.models.cache import Cache, resize

# Tokens, of all rows together, that one pass of a prefill takes; longer prompts go through in chunks. 4,096 rows keep a
# matrix unit busy, and what a pass of Qwen3-8B holds beside weights and caches is about 1 GB.
PREFILL_TOKENS = 4096
SMALLEST_CHUNK = 64


@flax.struct.dataclass
class DecodeState:
    """One batch of generations in flight. Letters: B rows, O slots of the token buffer.

    target_cache: keys and values.  draft_cache: what the drafter keeps of the text (drafters.py); () without one.
    lengths: int32 [B], committed rows of both caches = absolute position of the anchor.
    anchors: int32 [B], last chosen token, not yet in the caches.  before: int32 [B], the token before it.
    keys: [B], noise keys of the requests.           limits: int32 [B], most tokens to emit (max_new_tokens).
    tokens: int32 [B, O], emitted so far.  counts: int32 [B], how many.
    accepts: int32 [B, O], tokens emitted per round. rounds: int32 [B], how many rounds.
    drafted: int32 [B], drafts that these rounds offered to the target.
    done: bool [B]; a finished row is computed along but never advances.
    endless: bool [B], rows that a stop id does not end; None where it ends all.
    sampling: of each row, where the requests differ; None where all sample alike.
    """

    target_cache: Cache
    draft_cache: Any
    lengths: jax.Array
    anchors: jax.Array
    before: jax.Array
    keys: jax.Array
    limits: jax.Array
    tokens: jax.Array
    counts: jax.Array
    accepts: jax.Array
    rounds: jax.Array
    drafted: jax.Array
    done: jax.Array
    endless: jax.Array | None = None
    sampling: RowSampling | None = None


@flax.struct.dataclass
class Prompts:
    """A batch of prompts to start. Letters: B rows, P tokens of the longest row, or more.

    tokens: int32 [B, P], right-padded.  lengths: int32 [B], true ones, at least 1.
    limits, keys, endless: of DecodeState.  sampling: of each row; None where all sample as the generator does.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    keys: jax.Array
    sampling: RowSampling | None = None
    endless: jax.Array | None = None


def emit(state: DecodeState, tokens: jax.Array, count: jax.Array, stop_ids: jax.Array) -> tuple[DecodeState, jax.Array]:
    """Appends the first `count` int32 [B] of tokens int32 [B, T] to every unfinished row, cut at stop id and limit.

    Returns the state and the number of tokens emitted per row. A row is done after a stop id or at its limit.
    """
    index = jnp.arange(tokens.shape[1])
    is_stop = (tokens[:, :, None] == stop_ids).any(-1)
    if state.endless is not None:
        is_stop &= ~state.endless[:, None]
    first_stop = jnp.where(is_stop.any(1), jnp.argmax(is_stop, axis=1) + 1, tokens.shape[1] + 1)
    emitted = jnp.minimum(jnp.minimum(count, first_stop), state.limits - state.counts)
    stopped = first_stop <= emitted
    emitted = jnp.where(state.done, 0, emitted)
    rows = jnp.arange(tokens.shape[0])
    # Positions outside the buffer are dropped by the scatter.
    where = jnp.where(index < emitted[:, None], state.counts[:, None] + index, state.tokens.shape[1])
    counts = state.counts + emitted
    last = jnp.concatenate([state.before[:, None], state.anchors[:, None], tokens], axis=1)
    state = state.replace(
        tokens=state.tokens.at[rows[:, None], where].set(tokens, mode="drop"),
        counts=counts,
        anchors=last[rows, emitted + 1],
        before=last[rows, emitted],
        done=state.done | stopped | (counts >= state.limits),
    )
    return state, emitted


def record_round(state: DecodeState, emitted: jax.Array) -> DecodeState:
    """Counts a round by the tokens that each row emitted, int32 [B]; finished rows emit none and record nothing."""
    rows = jnp.arange(emitted.shape[0])
    where = jnp.where(emitted > 0, state.rounds, state.accepts.shape[1])
    return state.replace(
        accepts=state.accepts.at[rows, where].set(emitted, mode="drop"), rounds=state.rounds + (emitted > 0)
    )


def prefill(
    models: Pair,
    prompts: Prompts,
    stop_ids: jax.Array,
    earlier: tuple[Cache, Any] | None = None,
    offset: jax.Array | int = 0,
    *,
    slots: int,
    buffer: int,
    sampling: Sampling,
) -> DecodeState:
    """Runs the prompts and emits each row's first token. The caches have `slots` ≥ P slots, the token buffer `buffer`.

    Padding writes rows past a prompt's length, so nothing reads them before they are overwritten. Only the last true
    row goes through the lm_head. Attention runs over P slots, whatever the size of the cache: over all of 448 slots a
    prefill of 16 × 256 rows took 1.6 × as long.

    Args:
        earlier: both caches of texts that begin as the prompts do.
        offset: int32, how many of their rows to take; `prompts.tokens` are then those after it, prompts.lengths are of
            the whole prompts, and `slots` ≥ offset + P. Attention runs over all slots.
    """
    sampling = prompts.sampling or sampling
    new = prompts.lengths - offset
    if earlier:
        earlier = resize(earlier, slots)
    *caches, last = read_prompts(models, prompts.tokens, new, earlier, offset)
    target_cache, draft_cache = resize(caches, slots)
    first = choose(models.unembed(last), prompts.keys, prompts.lengths[:, None], sampling, stop_ids=stop_ids)
    zeros = jnp.zeros_like(prompts.lengths)
    ends = jnp.take_along_axis(prompts.tokens, new[:, None] - 1, axis=1)[:, 0]
    state = DecodeState(
        target_cache=target_cache,
        draft_cache=draft_cache,
        lengths=prompts.lengths,
        anchors=ends,
        before=ends,
        keys=prompts.keys,
        limits=prompts.limits,
        tokens=jnp.zeros((len(zeros), buffer), jnp.int32),
        counts=zeros,
        accepts=jnp.zeros((len(zeros), buffer), jnp.int32),
        rounds=zeros,
        drafted=zeros,
        done=zeros.astype(bool),
        endless=prompts.endless,
        sampling=prompts.sampling,
    )
    return emit(state, first, jnp.ones_like(zeros), stop_ids)[0]


def read_prompts(
    models: Pair,
    tokens: jax.Array,
    lengths: jax.Array,
    earlier: tuple[Cache, Any] | None = None,
    offset: jax.Array | int = 0,
) -> tuple[Cache, Any, jax.Array]:
    """(target's cache, drafter's cache or (), hidden states [B, 1, D] of the last true rows), caches of P slots.

    Long prompts go through in chunks of equal size, so that memory grows with the caches only. The last chunk ends at
    P, and may repeat some rows of the one before it.

    Args:
        earlier: caches in whose slots from `offset` on the rows are written, and which are returned with them.
    """
    batch, padded = tokens.shape
    room = PREFILL_TOKENS // batch  # tokens of each row in one pass, rounded down to a power of two
    size = min(padded, max(1 << (room.bit_length() - 1) if room else 0, SMALLEST_CHUNK))
    drafter = models.drafter
    taps = drafter.config.target_layer_ids if drafter else ()
    after = jnp.roll(tokens, -1, axis=1)  # the token after the last true row is not known yet

    def read(chunk, carry):
        cache, context, last = carry
        start = jnp.minimum(chunk * size, padded - size)
        part = jax.lax.dynamic_slice_in_dim(tokens, start, size, axis=1)
        slots = jnp.broadcast_to(offset + start + jnp.arange(size), part.shape)
        out = models.run_target(part, slots, cache=cache, slots=slots, tap_layers=taps, with_logits=False)
        place = (lengths - 1 - start)[:, None, None]
        here = jnp.take_along_axis(out["hidden"], jnp.clip(place, 0, size - 1), axis=1)
        if drafter:
            following = jax.lax.dynamic_slice_in_dim(after, start, size, axis=1)
            count = jnp.clip(lengths - start, 0, size)
            text = TargetRows(out["features"], models.embed(following), count)
            context = models.bound.extend_context(context, text, slots)
        return out["cache"], context, jnp.where((place >= 0) & (place < size), here, last)

    if earlier is None:
        earlier = models.target.init_cache(batch, padded), drafter.init_cache(batch, padded) if drafter else ()
    last = jnp.zeros((batch, 1, models.target.config.hidden_size), models.target.dtype)
    if size == padded:
        return read(0, (*earlier, last))
    return jax.lax.fori_loop(0, -(-lengths.max() // size), read, (*earlier, last))


def run_rounds(
    round_: Callable[[Pair, DecodeState, jax.Array], DecodeState],
    models: Pair,
    state: DecodeState,
    stop_ids: jax.Array,
    max_rounds: jax.Array,
    idle: jax.Array,
    longest: jax.Array,
) -> DecodeState:
    """Runs up to `max_rounds` rounds in one loop, without a host read. The limits are traced int32 scalars.

    Args:
        round_: (models, state, stop_ids) → the state after one round or step (rounds.py).
        idle: the loop ends when more rows than this are done. With the number of rows that are free already it ends as
            soon as one more is done, so that its slot can go to the next request.
        longest: the loop ends when a row that is not done is longer than this, so that the caches can grow.
    """

    def unfinished(carry):
        count, state = carry
        longest_row = jnp.where(state.done, 0, state.lengths).max()
        return (count < max_rounds) & (state.done.sum() <= idle) & (longest_row <= longest)

    start = (jnp.int32(0), state)
    return jax.lax.while_loop(unfinished, lambda carry: (carry[0] + 1, round_(models, carry[1], stop_ids)), start)[1]


def take_rows(tree: Any, rows: jax.Array) -> Any:
    """A state, or a part of one, of the rows at places int32 [R]; arrays [B, …] become [R, …]."""
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def put_rows(state: DecodeState, fresh: DecodeState, places: jax.Array) -> DecodeState:
    """The state with the batch `fresh` at places int32 [R]: new requests where others have ended.

    The new rows' caches may have fewer slots. Those after them keep what the last request wrote, past the new length.
    """

    def put(rows: jax.Array, new: jax.Array) -> jax.Array:
        return rows.at[(places, *map(slice, new.shape[1:]))].set(new)

    return jax.tree.map(put, state, fresh)
