"""loop.py: what a round adds to the state, where it stops, and that a rejected draft leaves nothing behind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.loop import DecodeState, emit, run_rounds
from domino_jax.method.settings import SamplingParams
from tests.helpers.decoding_models import make_generator, planted_drafts, random_models, random_prompts

WARM = SamplingParams(1.0)  # draft and target share their noise, so a random drafter is right now and then


def make_state(**fields) -> DecodeState:
    """One row that has emitted 7 8 (buffer of 6), and whose anchor 8 stands at position 5."""
    values = {
        "lengths": jnp.array([5]),
        "anchors": jnp.array([8]),
        "before": jnp.array([7]),
        "keys": jax.random.key(0)[None],
        "limits": jnp.array([6]),
        "tokens": jnp.array([[7, 8, 0, 0, 0, 0]]),
        "counts": jnp.array([2]),
        "accepts": jnp.zeros((1, 6), jnp.int32),
        "rounds": jnp.array([0]),
        "drafted": jnp.array([0]),
        "done": jnp.array([False]),
        **fields,
    }
    return DecodeState(target_cache=(), draft_cache=(), **values)


@pytest.mark.parametrize(
    ("tokens", "count", "limit", "expected", "done"),
    [
        ([4, 5, 6], 3, 6, [7, 8, 4, 5, 6], False),
        ([4, 5, 6], 1, 6, [7, 8, 4], False),
        ([4, 5, 6], 3, 4, [7, 8, 4, 5], True),
        ([4, 5, 6], 3, 5, [7, 8, 4, 5, 6], True),
        ([9, 5, 6], 3, 6, [7, 8, 9], True),
        ([4, 9, 6], 3, 6, [7, 8, 4, 9], True),
        ([4, 5, 9], 3, 6, [7, 8, 4, 5, 9], True),
        ([4, 1, 9], 3, 6, [7, 8, 4, 1], True),
        ([4, 5, 9], 2, 6, [7, 8, 4, 5], False),  # the stop id is after what was accepted
        ([4, 5, 9], 3, 4, [7, 8, 4, 5], True),  # and here after the limit
    ],
)
def test_emit_cuts_at_the_first_stop_id_and_at_the_limit(tokens, count, limit, expected, done):
    state = make_state(limits=jnp.array([limit]))
    state, kept = emit(state, jnp.array([tokens]), jnp.array([count]), jnp.array([1, 9]))
    assert state.tokens[0].tolist() == expected + [0] * (6 - len(expected))
    assert (state.counts.tolist(), kept.tolist()) == ([len(expected)], [len(expected) - 2])
    assert (state.anchors.tolist(), state.done.tolist()) == ([expected[-1]], [done])
    assert state.before.tolist() == [expected[-2]]


def test_a_finished_row_takes_nothing():
    before = make_state(done=jnp.array([True]))
    after, kept = emit(before, jnp.array([[4, 5, 6]]), jnp.array([3]), jnp.array([-1]))
    assert kept.tolist() == [0]
    assert after.tokens.tolist() == before.tokens.tolist()
    assert (after.counts.tolist(), after.anchors.tolist(), after.done.tolist()) == ([2], [8], [True])
    assert after.before.tolist() == [7]


def test_rounds_end_before_a_row_that_goes_on_is_longer_than_allowed():
    """The first row is done and may be of any length; the second grows by two."""

    def one(models, state, stop_ids):
        return state.replace(lengths=state.lengths + jnp.array([0, 2]))

    state = make_state(counts=jnp.array([2, 2]), done=jnp.array([True, False]), lengths=jnp.array([90, 5]))
    for longest, reached in [(4, 5), (5, 7), (6, 7), (7, 9), (50, 25)]:
        after = run_rounds(one, None, state, None, max_rounds=10, idle=1, longest=longest)
        assert after.lengths.tolist() == [90, reached]


@functools.lru_cache
def generator(mode="domino", batch=3):
    """A tiny generator and its program of rounds, jitted without donation, so that a state can be used twice."""
    made = make_generator(random_models(), sampling=WARM, batch_size=batch)
    program = jax.jit(made.rounds(mode))
    limits = np.int32(batch - 1), np.int32(64)
    return made, lambda state, rounds: program(made.models, state, made.stop_ids, np.int32(rounds), *limits)


@functools.lru_cache
def started():
    return generator()[0].start(random_prompts(3, longest=9), [0, 1, 2])


def assert_same(one, two):
    """Same texts, rounds and lengths; the caches up to the committed length."""
    for field in ("lengths", "anchors", "tokens", "counts", "accepts", "rounds", "done"):
        np.testing.assert_array_equal(getattr(one, field), getattr(two, field), err_msg=field)


@functools.lru_cache
def planted():
    """One prompt's text, hot so that few tokens repeat, and a drafter that is always right (5 tokens a round)."""
    made = make_generator(random_models(), sampling=SamplingParams(4.0))
    [prompt] = random_prompts(1, shortest=6, seed=3)
    text = made.generate([prompt], "autoregressive")[0].token_ids
    with planted_drafts(np.array([text])):
        made.generate([prompt], "domino")
    return made, prompt, text


def test_a_stop_id_ends_the_text_in_every_slot_of_a_block():
    made, prompt, text = planted()
    slots = []
    for place, token in enumerate(text[:12]):
        if token in text[:place]:
            continue
        [answer] = made.with_stop_ids(token).generate([prompt], "domino")
        assert (answer.token_ids, answer.finish_reason) == (text[: place + 1], "stop")
        assert sum(answer.accept_lengths) == place
        assert answer.accept_lengths == [5] * (place // 5) + [place % 5] * (place % 5 > 0)
        slots.append((place - 1) % 5)
    assert set(slots) == {0, 1, 2, 3, 4} and len(slots) >= 10


def test_the_limit_ends_the_text_at_every_remainder_of_a_block():
    made, prompt, text = planted()
    for limit in range(2, 14):
        state = made.start([prompt], [0]).replace(limits=jnp.array([limit]))
        state = made.advance(state, "domino", 16)
        assert (state.counts.tolist(), state.done.tolist()) == ([limit], [True])
        assert state.tokens[0, :limit].tolist() == text[:limit]
        assert state.accepts[0].sum() == limit - 1
        assert state.lengths.tolist() == [len(prompt) + limit - 1]


def poison(state, first):
    """1e4 in every cache row from `first` int32 [B] on."""
    after = (jnp.arange(64) >= first[:, None])[:, None, :, None]
    spoil = functools.partial(jax.tree.map, lambda leaf: jnp.where(after, 1e4, leaf))
    return state.replace(target_cache=spoil(state.target_cache), draft_cache=spoil(state.draft_cache))


def test_what_is_after_the_length_is_never_read():
    """After three rounds in which drafts were accepted and rejected."""
    _, run = generator()
    state = run(started(), 3)
    assert 1 < state.accepts[:, :3].max() and state.accepts[:, :3].min() < 5
    clean = run(state, 16)
    assert_same(clean, run(poison(state, state.lengths), 16))
    assert (clean.tokens != run(poison(state, state.lengths - 1), 16).tokens).any()
