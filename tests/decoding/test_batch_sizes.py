"""The batch follows the requests that are left: the same texts, and no more rows than they need."""

import functools

import jax
import pytest

from domino_jax.decoding.programs import Programs
from domino_jax.decoding.requests import Request
from domino_jax.method.settings import SamplingParams, TreeSettings
from domino_jax.models.cache import slots_of
from tests.helpers.decoding_models import SmallGenerator, make_generator, random_models, random_prompts, texts

WARM = SamplingParams(1.0)
MODES = ("autoregressive", "draft", "tree")
TREE = TreeSettings(nodes=8, lanes=2, candidates=8)
# Two of the first eight go on, then one; the last three wait for a row.
LIMITS = (3, 20, 4, 1, 5, 30, 2, 4, 6, 5, 7)
PROMPTS = random_prompts(11, 1, 12)
SAMPLINGS = [None, SamplingParams(), SamplingParams(1.3, top_p=0.8)]


def requests_of(samplings=(None,)) -> list[Request]:
    return [
        Request(index, max_new_tokens=limit, sampling=samplings[index % len(samplings)])
        for index, limit in enumerate(LIMITS)
    ]


@functools.lru_cache
def generator(batch: int = 8, **choices) -> SmallGenerator:
    shape = {"cache_slots": 64, "max_new_tokens": 30, "batch_size": batch, **choices}
    tree = None if "fixed_shape" in choices else TREE
    return make_generator(random_models(), **shape, sampling=WARM, tree=tree)


def visited(made: SmallGenerator, monkeypatch, *call) -> tuple[list[int], list[list[int]]]:
    """The rows of the batches that dispatches of rounds ran over, in order, and the texts."""
    seen = []
    advance = type(made.generator).advance

    def watch(self, models, state, *rest, **more):
        assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {len(state.done)}
        seen.append(len(state.done))
        return advance(self, models, state, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(type(made.generator), "advance", watch)
        return seen, texts(made.generate(*call))


def test_a_prompt_is_admitted_to_a_batch_of_any_size(monkeypatch):
    """All rows end together: eight are admitted to eight rows, and the seventeenth to the two that are left."""
    prompts = PROMPTS[:1] * 17
    requests = [Request(index, max_new_tokens=4) for index in range(17)]
    sizes, found = visited(generator(), monkeypatch, prompts, "autoregressive", requests)
    assert sorted(set(sizes)) == [2, 8]
    assert found == texts(generator(1).generate(prompts, "autoregressive", requests))


@pytest.mark.parametrize("mode", MODES)
def test_prompts_are_admitted_to_a_large_batch_together(mode):
    """25 prompts on sixteen rows: two at a time while two wait, and the last one alone."""
    prompts = (PROMPTS * 3)[:25]
    requests = [Request(index, max_new_tokens=LIMITS[index % 11]) for index in range(25)]
    made = make_generator(random_models(), cache_slots=64, max_new_tokens=30, batch_size=16, sampling=WARM, tree=TREE)
    assert texts(made.generate(prompts, mode, requests)) == texts(generator(1).generate(prompts, mode, requests))
    assert {key[3] for key in made.compiled if key[0] == "admit"} == {1, 2}


@pytest.mark.parametrize(
    ("mode", "samplings", "smallest_cache"), [*((mode, (None,), 64) for mode in MODES), ("draft", tuple(SAMPLINGS), 32)]
)
def test_texts_are_the_same_in_a_batch_that_shrinks(mode, samplings, smallest_cache, monkeypatch):
    """A queue of eleven on eight rows, then on two; once with caches that grow meanwhile."""
    call = PROMPTS, mode, requests_of(samplings)
    sizes, shrunk = visited(generator(smallest_cache=smallest_cache), monkeypatch, *call)
    assert set(sizes) == {8, 2} and sizes == sorted(sizes, reverse=True)
    with monkeypatch.context() as patch:
        patch.setattr(Programs, "smaller_batch", lambda self, rows: 0)
        sizes, whole = visited(generator(), monkeypatch, *call)
    assert set(sizes) == {8} and shrunk == whole
    assert [len(text) for text in shrunk] == list(LIMITS)


def test_a_dispatch_ends_as_soon_as_a_smaller_batch_holds_the_rest(monkeypatch):
    requests = [Request(index, max_new_tokens=limit) for index, limit in enumerate((3, 9, 3, 3, 3, 3, 14, 6))]
    made = make_generator(random_models(), batch_size=8)
    sizes, _ = visited(made, monkeypatch, random_prompts(8), "autoregressive", requests)
    assert sizes == [8, 2]


def test_few_requests_start_in_a_small_batch(monkeypatch):
    sizes, small = visited(generator(), monkeypatch, PROMPTS[:2], "draft", requests_of()[:2])
    assert set(sizes) == {2}
    assert small == texts(generator(1).generate(PROMPTS[:2], "draft", requests_of()[:2]))


def test_batches_are_quarters_of_the_largest():
    made = {batch: make_generator(random_models(), batch_size=batch) for batch in (1, 3, 6, 32)}
    assert [made[32].batch_rows(count) for count in (1, 2, 3, 8, 9, 32, 99)] == [2, 2, 8, 8, 32, 32, 32]
    assert [made[6].batch_rows(count) for count in (0, 1, 2)] == [1, 1, 6]
    assert (made[3].batch_rows(1), made[1].batch_rows(1)) == (3, 1)


def test_in_fixed_shape_the_batch_keeps_its_rows(monkeypatch):
    """Sums over other numbers of rows may round otherwise, and modes end rows after different numbers of rounds."""
    made = generator(fixed_shape=True)
    runs = [visited(made, monkeypatch, PROMPTS, mode, requests_of()) for mode in ("autoregressive", "draft")]
    assert [set(sizes) for sizes, _ in runs] == [{8}, {8}]
    assert runs[0][1] == runs[1][1]


def test_rows_that_stay_keep_all_they_have_and_the_old_caches_are_used_up():
    made = generator(smallest_cache=32)
    state = made.start(PROMPTS[:8], range(8))
    batch = made._batch(made.models, "draft", PROMPTS[:8], [made.request(index) for index in range(8)])
    before = jax.tree.map(lambda leaf: leaf.copy(), state.replace(keys=jax.random.key_data(state.keys)))
    caches = jax.tree.leaves((state.target_cache, state.draft_cache))
    shrunk = made._fit(batch, state, 20, [6, 1])
    assert slots_of(shrunk.target_cache) == slots_of(shrunk.draft_cache) == 32
    shrunk = shrunk.replace(keys=jax.random.key_data(shrunk.keys))
    for whole, rows in zip(jax.tree.leaves(before), jax.tree.leaves(shrunk), strict=True):
        slots = rows.shape[2] if rows.ndim == 4 else None
        assert (rows == (whole[:, :, :slots] if slots else whole)[jax.numpy.array([6, 1])]).all()
    assert all(leaf.is_deleted() for leaf in caches)
