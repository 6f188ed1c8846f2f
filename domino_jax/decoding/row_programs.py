"""The programs that move the rows of a batch: into it, to another batch or caches of another size, and out of it.

A first reader can skip this file: nothing is computed here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.programs import Program
from domino_jax.method.loop import DecodeState, put_rows, take_rows
from domino_jax.models.cache import resize, slots_of


def sizes_of(state: DecodeState) -> tuple:
    """The parts of a program's key: rows, slots, whether the drafter's caches are there, and the kind of sampling."""
    kind = state.sampling and state.sampling.kind
    return len(state.done), slots_of(state.target_cache), bool(state.draft_cache), kind


def admit_program(state: DecodeState, fresh: DecodeState, rows: Sequence[int]) -> Program:
    """The batch `fresh` at these rows of the state."""
    sizes = sizes_of(state)
    key = ("admit", *sizes[:2], *sizes_of(fresh)[:2], *sizes[2:])
    return Program(key, put_rows, (state, fresh, np.array(rows, np.int32)), donate=(0,))


def empty_program(fresh: DecodeState, rows: int, slots: int) -> Program:
    """A batch without requests, whose rows are like the first one of `fresh`."""
    caches = jax.eval_shape(functools.partial(resize, slots=slots), (fresh.target_cache, fresh.draft_cache))
    function = functools.partial(_empty_batch, caches=caches, rows=rows)
    key = ("empty", rows, slots, *sizes_of(fresh)[2:])
    return Program(key, function, (fresh.replace(target_cache=(), draft_cache=()),))


def keep_program(state: DecodeState, row: int, slots: int) -> Program:
    """Both caches of one row with `slots` slots, or as many as there are."""
    slots = min(slots, slots_of(state.target_cache))
    arguments = ((state.target_cache, state.draft_cache), np.array([row], np.int32))
    return Program(("keep", *sizes_of(state)[:3], slots), functools.partial(_cut_out, slots=slots), arguments)


def resize_state(
    state: DecodeState,
    rows: int,
    slots: int,
    staying: Sequence[int],
    run: Callable[[Program], Any],
    delete: Callable[[Any], None],
) -> DecodeState:
    """A batch of `rows` with caches of `slots`, layer by layer, so that at most one layer exists twice.

    Args:
        staying: the old rows that are taken over; the rows after them are done.
    """
    places = np.array([*staying, *[0] * (rows - len(staying))], np.int32)

    def match(part: Any) -> Any:
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(part))
        function = functools.partial(_resize_part, slots=slots)
        matched = run(Program(("resize", shapes, rows, slots), function, (part, places)))
        delete(part)
        return matched

    before, kind = len(state.done), state.sampling and state.sampling.kind
    target, draft = tuple(map(match, state.target_cache)), tuple(map(match, state.draft_cache))
    state = state.replace(target_cache=(), draft_cache=())
    if rows != before:
        arguments = (state, places, np.arange(rows) >= len(staying))
        state = run(Program(("rows", before, rows, kind), _resize_rows, arguments))
    return state.replace(target_cache=target, draft_cache=draft)


def _empty_batch(state: DecodeState, *, caches: tuple, rows: int) -> DecodeState:
    target, draft = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), caches)
    state = take_rows(state, jnp.zeros(rows, jnp.int32))
    return state.replace(done=jnp.ones(rows, bool), target_cache=target, draft_cache=draft)


def _resize_rows(state: DecodeState, rows: jax.Array, ended: jax.Array) -> DecodeState:
    state = take_rows(state, rows)
    return state.replace(done=state.done | ended)


def _resize_part(part: Any, rows: jax.Array, slots: int) -> Any:
    if len(rows) != len(jax.tree.leaves(part)[0]):
        part = take_rows(part, rows)
    return resize(part, slots)


def _cut_out(caches: tuple, rows: jax.Array, slots: int) -> tuple:
    return resize(take_rows(caches, rows), slots)
