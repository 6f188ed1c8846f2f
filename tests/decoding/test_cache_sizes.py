"""The caches follow the longest row that goes on: the same texts whatever their sizes, and no more than texts need."""

import functools

import jax
import numpy as np
import pytest

from domino_jax.decoding import generate
from domino_jax.decoding.requests import Request
from domino_jax.method.settings import SamplingParams, TreeSettings
from domino_jax.models.cache import init_cache, resize, slots_of
from tests.helpers.decoding_models import SmallGenerator, make_generator, random_models, random_prompts, texts

WARM = SamplingParams(1.0)
MODES = ("autoregressive", "draft", "tree")
WHOLE = 128
TREE = TreeSettings(nodes=12, lanes=3, candidates=8)
# Short ones, one just below and one just above a size, and long ones.
PROMPTS = [*random_prompts(2), *random_prompts(1, 14, 14), *random_prompts(1, 17, 17), *random_prompts(2, 30, 40)]
LIMITS = (40, 7, 12, 3, 60, 1)
REQUESTS = [Request(index, max_new_tokens=limit) for index, limit in enumerate(LIMITS)]


@functools.lru_cache
def generator(smallest: int, batch: int = 1, **choices) -> SmallGenerator:
    shape = {"cache_slots": WHOLE, "max_new_tokens": 60, "smallest_cache": smallest, "batch_size": batch}
    tree = None if "fixed_shape" in choices else TREE
    return make_generator(random_models(), **shape, sampling=WARM, tree=tree, **choices)


def sizes(made: SmallGenerator, mode: str) -> set[int]:
    """Slots of the caches that a mode's rounds have run over."""
    return {key[2] for key in made.compiled if key[0] == mode}


@functools.lru_cache
def expected(mode: str) -> list[list[int]]:
    """The texts with caches that always have all slots."""
    return texts(generator(WHOLE, batch=3).generate(PROMPTS, mode, REQUESTS))


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_the_same_with_any_sizes(mode):
    """Three rows at a time: rows of different length grow, end and are used again."""
    for smallest in (16, 64):
        made = generator(smallest, batch=3)
        assert texts(made.generate(PROMPTS, mode, REQUESTS)) == expected(mode)
        assert {64, 128} >= sizes(made, mode) - {16, 32} >= {64}
    assert sizes(generator(16, batch=3), mode) & {16, 32}


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_that_outgrows_its_caches_is_the_answer(mode):
    """A prompt of more than 30 tokens and 60 new ones."""
    made = generator(16)
    pieces = list(made.stream(PROMPTS[4], mode, 3, REQUESTS[4]))
    assert sum((piece.token_ids for piece in pieces), []) == expected(mode)[4]
    assert len(sizes(made, mode)) > 1
    rounds = sum((piece.accept_lengths for piece in pieces), [])
    assert sum(rounds) == (0 if mode == "autoregressive" else 59)


def visited(made: SmallGenerator, monkeypatch, *call) -> list[int]:
    """The sizes of the caches over which dispatches of rounds ran, in order."""
    seen = []
    advance = type(made.generator).advance

    def watch(self, models, state, *rest, **more):
        seen.append(slots_of(state.target_cache))
        assert not state.draft_cache or slots_of(state.draft_cache) == seen[-1]
        return advance(self, models, state, *rest, **more)

    monkeypatch.setattr(type(made.generator), "advance", watch)
    made.generate(*call)
    return seen


def test_the_caches_grow_by_doubling_and_shrink_when_the_long_row_is_done(monkeypatch):
    """A prompt of 40 with 4 new tokens, then three of 5 with 20, which end in 32 slots."""
    prompts = [*random_prompts(1, 40, 40), *random_prompts(3, 5, 5)]
    requests = [Request(0, max_new_tokens=4), *(Request(index, max_new_tokens=20) for index in (1, 2, 3))]
    seen = visited(generator(16, batch=2), monkeypatch, prompts, "draft", requests)
    assert seen[0] == 64 and 16 in seen and seen[-1] == 32 and max(seen) == 64


@pytest.mark.parametrize("mode", MODES)
def test_while_prompts_wait_the_caches_have_no_more_than_the_longest_answer_needs(mode, monkeypatch):
    """Prompts of 33 with 40 new tokens and a block: 96 slots, a multiple of 16, where a power of two is 128."""
    prompts = random_prompts(5, 33, 33)
    requests = [Request(index, max_new_tokens=40) for index in range(5)]
    monkeypatch.setattr(generate, "QUEUE_STEP", 16)
    made = generator(16, batch=2)
    together = generator(16, batch=5)
    assert max(visited(made, monkeypatch, prompts, mode, requests)) == 96
    assert max(visited(together, monkeypatch, prompts, mode, requests)) == 128
    assert texts(made.generate(prompts, mode, requests)) == texts(together.generate(prompts, mode, requests))


def test_a_short_answer_compiles_no_more_than_a_prefill_and_its_rounds():
    made = make_generator(random_models(), cache_slots=8_192, max_new_tokens=16)
    made.generate([[7, 8]], "draft")
    assert [key[0] for key in made.compiled] == ["prefill", "draft"]
    assert sizes(made, "draft") == {256}


def test_sizes_are_powers_of_two_from_the_smallest_to_the_limit():
    made = make_generator(random_models(), cache_slots=448, smallest_cache=96)
    assert [made.slots(rows) for rows in (1, 128, 129, 256, 257, 448)] == [128, 128, 256, 256, 448, 448]
    assert make_generator(random_models(), smallest_cache=1).slots(3) == 16  # a prompt is padded to 16


def test_a_resized_cache_keeps_its_rows():
    [layer] = init_cache(1, 2, 3, 2, 4)
    layer = tuple(part + np.arange(3).reshape(1, 1, 3, 1) + 1 for part in layer)
    for slots in (2, 3, 5):
        for part in resize(layer, slots):
            assert part.shape == (2, 2, slots, 4)
            assert part[1, 1, :, 3].tolist() == [1, 2, 3, 0, 0][:slots]


@pytest.mark.parametrize("batch", [1, 3])
def test_in_fixed_shape_caches_keep_one_size_that_no_mode_decides(batch, monkeypatch):
    """Sums over more slots may round otherwise, and a draft reaches a length in fewer rounds than plain decoding."""
    made = generator(16, batch, fixed_shape=True)
    for mode in ("autoregressive", "draft"):
        with monkeypatch.context() as patch:
            assert set(visited(made, patch, PROMPTS, mode, REQUESTS)) == {WHOLE}
    plain, fast = (texts(made.generate(PROMPTS, mode, REQUESTS)) for mode in ("autoregressive", "draft"))
    assert plain == fast == expected("draft")


def test_growing_uses_the_old_caches_up():
    made = generator(16)
    state = made.start([[7, 8]], [0], rows=1)
    leaves = jax.tree.leaves((state.target_cache, state.draft_cache))
    batch = made._batch(made.models, "draft", [[7, 8]], [made.request(0)])
    shrunk = made._fit(batch, state, 2, [0])
    assert slots_of(shrunk.target_cache) == slots_of(shrunk.draft_cache) == 16
    assert all(leaf.is_deleted() for leaf in leaves)
