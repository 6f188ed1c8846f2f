"""The roll-out of a head: slot after slot of a block is drafted, each given the draft before it.

Letters: B rows, M drafts, Q candidates of a slot.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.method.candidates import Candidates
from domino_jax.method.pair import Pair
from domino_jax.method.sampling import Sampling, choose_with, process_logits
from domino_jax.method.settings import SamplingParams
from domino_jax.models.shapes import Hidden

GREEDY = SamplingParams()
# Candidates of a slot, of all rows together, up to which the head's reading of all of them is computed before the
# chain. With more of them the product takes longer than reading its matrix for every draft, by the ratio of arithmetic
# to memory of a v5p (166) and of an H100 (295).
AHEAD = 128


class Drafted(NamedTuple):
    """Drafts int32 [B, M], their places int32 [B, M] among the candidates, and log_q float32 [B, M], how likely the
    drafter finds each of them after those before it (`choose_scored_drafts`)."""

    tokens: jax.Array
    places: jax.Array
    log_q: jax.Array | None = None


def scan_drafts(step: Callable[[Any, Any], tuple[Any, Any]], start: Any, slots: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` for the drafts of a round, unrolled on a GPU.

    A GPU's command buffer ends at a loop; unrolled, all drafts fit into one. Elsewhere a loop compiles faster and runs
    as fast: unrolled, four depths of a tree took a third longer to compile.
    """
    return jax.lax.platform_dependent(
        start,
        slots,
        cuda=lambda start, slots: jax.lax.scan(step, start, slots, unroll=True),
        default=lambda start, slots: jax.lax.scan(step, start, slots),
    )


def choose_drafts(candidates: Candidates, sampling: Sampling = GREEDY, sharpness: float = 1.0) -> Drafted:
    """The draft at each slot: argmax(sharpness · log p + g) over the candidates; greedy without noise."""
    places = choose_with(candidates.logits, candidates.noise, sampling, sharpness)
    tokens = places if candidates.token_ids is None else _take(candidates.token_ids, places)
    return Drafted(tokens, places)


def choose_scored_drafts(candidates: Candidates, sampling: Sampling = GREEDY, sharpness: float = 1.0) -> Drafted:
    """`choose_drafts` with log_q: of the drafter's distribution over the candidates, after the request's temperature,
    top-k, top-p and min-p."""
    drafted, log_q = choose_drafts(candidates, sampling, sharpness), process_logits(candidates.logits, sampling)
    return drafted._replace(log_q=_take(log_q, drafted.places) - jax.nn.logsumexp(log_q, axis=-1))


def _take(values: jax.Array, places: jax.Array) -> jax.Array:
    """values [B, M, Q] at places int32 [B, M]."""
    return jnp.take_along_axis(values, places[:, :, None], axis=-1)[:, :, 0]


def roll_out(
    models: Pair,
    prefix_tokens: jax.Array,
    z: Hidden,
    candidates: Candidates,
    choose: Callable[[Candidates], Drafted] = choose_drafts,
) -> Drafted:
    """Draft tokens int32 [B, M]: the first ones from base logits alone, the others corrected one after another.

    What of the head does not depend on tokens is computed for all slots before the loop, and so are the candidates'
    rows of its last matrix. Draft i sees the state after the anchor and drafts 1..i-1.

    Args:
        prefix_tokens: int32 [B, 1 + extra_slots], the anchor, and the token before it where the head reads that.
        z: [B, T, D] of all slots that the head sees.  candidates: of the first M slots that predict a token.
        choose: the candidates of some slots, with arrays [B, m, Q] → their drafts.
    """
    slots, extra = candidates.logits.shape[1], prefix_tokens.shape[1] - 1
    prefix = min(models.drafter.config.pure_draft_prefix_len, slots)
    first = choose(jax.tree.map(lambda column: column[:, :prefix], candidates))
    consumed = jnp.concatenate([prefix_tokens, first.tokens], axis=1)
    z_terms = models.head.z_terms(z)[:, : extra + slots]
    corrected = jax.tree.map(lambda column: column[:, prefix:], candidates)
    rows = None if corrected.vocab_ids is None else models.head.rows(corrected.vocab_ids)

    few = rows is not None and rows.shape[0] * rows.shape[2] <= AHEAD
    chain = correct_by_device if few and models.head.reads_ahead else correct_slots
    rest = chain(models, consumed, (z_terms, corrected, rows), choose)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first, rest.T], axis=1), first, rest)


def correct_slots(models: Pair, consumed: jax.Array, slots: tuple, choose: Callable) -> Drafted:
    """The drafts of m slots after the consumed tokens int32 [B, n], arrays [m, B].

    Args:
        slots: terms of z [B, n - 1 + m, any]; candidates, arrays [B, m, Q]; their rows of the last matrix, or None.
        choose: of roll_out.
    """

    def step(state, token, terms):
        return models.head.step(state, models.head_inputs(token), terms)

    return _chain(models, consumed, step, lambda drafted, _: drafted.tokens, slots, choose)


def correct_slots_ahead(models: Pair, consumed: jax.Array, slots: tuple, choose: Callable) -> Drafted:
    """`correct_slots` with the head's reading of all candidates computed first, by one product that reads its matrix
    once and not for every draft."""
    token_ids, known = slots[1].token_ids, consumed.shape[1]
    tokens = jnp.concatenate([consumed, token_ids.reshape(len(token_ids), -1)], axis=1)
    readings = models.head.reading(models.head_inputs(tokens))

    def advance(state, reading, terms):
        return models.head.advance(state, reading, terms)

    def reading_of(drafted, index):
        place = known + index * token_ids.shape[2] + drafted.places
        return jnp.take_along_axis(readings, place[:, None, None], axis=1)[:, 0]

    return _chain(models, readings[:, :known], advance, reading_of, slots, choose)


def correct_by_device(*arguments: Any) -> Drafted:
    """Readings ahead on accelerators, not on a CPU, which has little arithmetic for its memory."""
    return jax.lax.platform_dependent(
        cpu=lambda: correct_slots(*arguments), default=lambda: correct_slots_ahead(*arguments)
    )


def _chain(
    models: Pair, before: jax.Array, advance: Callable, read: Callable, slots: tuple, choose: Callable
) -> Drafted:
    """Slot after slot, the loop carries the head's state and what it reads of the last token.

    Args:
        before: what it reads of the n consumed tokens, [B, n, ...].
        advance: (state, a reading, terms) → (state, code).
        read: (a slot's drafts, the slot) → the reading of the drafts.  slots, choose: of correct_slots.
    """
    z_terms, candidates, rows = slots
    state, known = models.head.initial_state(len(before)), before.shape[1]
    for index in range(known - 1):
        state, _ = advance(state, before[:, index], z_terms[:, index])

    def correct(carry, slot):
        terms, choices, rows, index = slot
        state, code = advance(*carry, terms)
        head = models.head
        change = head.residual(code)[:, None] if rows is None else head.residual_of(code[:, None], rows)
        choices = jax.tree.map(lambda column: column[:, None], choices)
        drafted = choose(choices._replace(logits=choices.logits + change))
        drafted = jax.tree.map(lambda column: column[:, 0], drafted)
        return (state, read(drafted, index)), drafted

    by_slot = jax.tree.map(lambda x: x.swapaxes(0, 1), (z_terms[:, known - 1 :], candidates, rows))
    numbers = jnp.arange(candidates.logits.shape[1])
    return scan_drafts(correct, (state, before[:, known - 1]), (*by_slot, numbers))[1]


def draft_in_passes(
    models: Pair,
    prefix_tokens: jax.Array,
    z: Hidden,
    candidates: Candidates,
    passes: int,
    choose: Callable[[Candidates], Drafted] = choose_drafts,
) -> Drafted:
    """Draft tokens int32 [B, M] by passes over the whole block; `roll_out` declares the arguments.

    The base logits give the first drafts. Each pass corrects every slot after the drafts of the pass before, and
    chooses again. After k passes the first k drafts are those of `roll_out`, so M passes, or more, are `roll_out`.
    """
    config, slots = models.drafter.config, candidates.logits.shape[1]
    z_terms = models.head.z_terms(z)[:, : config.extra_slots + slots]
    rows = None if candidates.vocab_ids is None else models.head.rows(candidates.vocab_ids)
    untouched = jnp.arange(slots)[:, None] < config.pure_draft_prefix_len

    def again(drafts, _):
        inputs = models.head_inputs(jnp.concatenate([prefix_tokens, drafts.tokens[:, :-1]], axis=1))
        head = models.head
        codes = head.codes(z_terms, inputs)[:, config.extra_slots :]
        change = head.residual(codes) if rows is None else head.residual_of(codes[:, :, None], rows)[:, :, 0]
        return choose(candidates._replace(logits=candidates.logits + jnp.where(untouched, 0.0, change))), None

    return scan_drafts(again, choose(candidates), jnp.arange(min(passes, slots)))[0]
