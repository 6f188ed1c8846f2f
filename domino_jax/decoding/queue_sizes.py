"""How large batch and caches of a queue are in its next dispatch, and the programs that change their sizes."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from domino_jax.decoding.prefill import open_kind
from domino_jax.decoding.prefixes import CachedText
from domino_jax.decoding.programs import Program, Programs
from domino_jax.method.loop import DecodeState, take_rows
from domino_jax.method.settings import SamplingKind
from domino_jax.models.cache import resize, slots_of

if TYPE_CHECKING:
    from domino_jax.decoding.queue import Queue, QueuedRequest

QUEUE_STEP = 128  # caches of a queue end at a multiple of it: TPUs pad scores to this many lanes


# ------------------------------------------------------------------------------------------------------- sizes


def whole_answers(generator: Programs, requests: Sequence["QueuedRequest"]) -> int:
    """Slots for the longest prompt with its whole answer and a block of any mode."""
    return max(len(entry.prompt) + entry.request.max_new_tokens for entry in requests) + generator.limits.block_rows


def cache_limits(generator: Programs, waiting: Sequence["QueuedRequest"]) -> tuple[int, int]:
    """The fewest and the most slots of a queue's caches."""
    largest = generator.settings.cache_length
    if generator.settings.fixed_shape:
        # Sums over more slots may round otherwise, and modes reach a length after different numbers of rounds. So the
        # caches keep one size, which does not depend on the mode.
        return generator.slots(whole_answers(generator, waiting)) if waiting else largest, largest
    if len(waiting) <= generator.settings.batch_size:
        return 0, largest
    # While prompts wait some row is always near its end, so the caches stay at their largest: no power of two.
    room = QUEUE_STEP * -(-whole_answers(generator, waiting) // QUEUE_STEP)
    longest = max(len(entry.prompt) for entry in waiting)
    return 0, min(max(room, generator.slots(generator.bucket(longest))), largest)


def batch_rows(queue: "Queue") -> int:
    settings, requests = queue.generator.settings, len(queue.live()) + len(queue.waiting)
    return settings.batch_size if queue.general else queue.generator.batch_rows(requests)


def cache_slots(queue: "Queue") -> int:
    """Slots for the longest live row and a block."""
    if queue.general:
        return queue.most
    generator, longest = queue.generator, max(entry.length for entry in queue.live().values())
    return queue.slots(generator.slots(longest + generator.block_rows(queue.mode)))


def rounds_kind(queue: "Queue") -> SamplingKind:
    """The kind of an open queue's rounds."""
    return open_kind([entry.request for entry in queue.live().values()], cheapest=not queue.general)


def admitted_together(queue: "Queue") -> int:
    """How many of the requests that wait take rows together."""
    return 1 if queue.open else queue.generator.admitted_together(len(queue.rows), len(queue.waiting))


def idle_rows(queue: "Queue") -> int:
    """A dispatch ends when more rows than this are done (loop.run_rounds): requests that wait can then have rows, or a
    smaller batch holds the rest."""
    smaller = 0 if queue.general else queue.generator.smaller_batch(len(queue.rows))
    return (admitted_together(queue) if queue.waiting else len(queue.rows) - smaller) - 1


def staying_rows(rows: Sequence[Any], count: int) -> list[int]:
    """The rows that a batch of `count` rows takes over; live ones first where some go."""
    order = range(len(rows))
    return sorted(order, key=lambda row: rows[row] is None)[:count] if count < len(rows) else list(order)


# ------------------------------------------------------------------------------------------------ their programs


def match_sizes(queue: "Queue", staying: Sequence[int]) -> None:
    """Changes batch and caches to the rows of the queue and to cache_slots, layer by layer, so that at most one layer
    exists twice. staying: the old rows that are taken over; those after them are done."""
    generator, state, rows, slots = queue.generator, queue.state, len(queue.rows), cache_slots(queue)
    before, taken = state.done.shape[0], len(staying)
    if (before, slots_of(state.target_cache)) == (rows, slots):
        return
    places = np.array([*staying, *[0] * (rows - taken)], np.int32)

    def run(key: tuple, function, *arguments):
        result, seconds = generator.run(queue.clock, Program(key, function, arguments))
        queue.clock.decode_seconds += seconds
        return result

    def match(part):
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(part))
        matched = run(("resize", shapes, rows, slots), functools.partial(_resize_part, slots=slots), part, places)
        generator.delete(part)
        return matched

    target = tuple(match(layer) for layer in state.target_cache)
    draft = tuple(match(part) for part in state.draft_cache)
    state = state.replace(target_cache=(), draft_cache=())
    if rows != before:
        state = run(("rows", before, rows, queue.kind), _resize_rows, state, places, np.arange(rows) >= taken)
    queue.state = state.replace(target_cache=target, draft_cache=draft)


def store_text(queue: "Queue", row: int, request: "QueuedRequest") -> None:
    """Stores the caches of a row that is done, cut to its text; without memory for it, frees all that are stored: the
    complete answer must not fail because of a copy that only later prompts need."""
    generator, state, whole = queue.generator, queue.state, slots_of(queue.state.target_cache)
    slots = min(generator.slots(request.length), whole)
    key = ("keep", len(queue.rows), whole, slots, queue.plain)
    arguments = ((state.target_cache, state.draft_cache), np.array([row], np.int32))
    program = Program(key, functools.partial(_cut_out, slots=slots), arguments)
    if not generator.at_hand(program):
        return
    try:
        caches, _ = generator.run(queue.clock, program)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        queue.prefixes.clear()
        return
    text = np.array([*request.prompt, *request.token_ids][: request.length], np.int32)
    queue.prefixes.add(CachedText(text, *caches))


def _resize_rows(state: DecodeState, rows: jax.Array, ended: jax.Array) -> DecodeState:
    state = take_rows(state, rows)
    return state.replace(done=state.done | ended)


def _resize_part(part, rows: jax.Array, slots: int):
    if len(rows) != len(jax.tree.leaves(part)[0]):
        part = take_rows(part, rows)
    return resize(part, slots)


def _cut_out(caches: tuple, rows: jax.Array, slots: int) -> tuple:
    return resize(take_rows(caches, rows), slots)
