"""Prompts that start from the caches of earlier texts: the text stays the same, and only what is new is read."""

import functools

import jax
import numpy as np
import pytest

from domino_jax.decoding.generate import Generation, Generator
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.queue import Queue, QueuedRequest
from domino_jax.decoding.requests import Request
from domino_jax.method.settings import SamplingParams, TreeSettings
from tests.decoding.test_lossless import DRAFTERS
from tests.helpers.decoding_models import make_generator, random_models, random_prompts, rows_read

SYSTEM, FIRST, SECOND, OTHER = random_prompts(4, 20, 20, seed=9)
SHAPE = {"cache_length": 160, "max_new_tokens": 12, "batch_size": 4, "tree": TreeSettings(9, 4, 8)}
CACHED = ("none", "domino windowed", "dflash2", "eagle3")  # drafters that keep different things of a text
CASES = [("domino", "autoregressive"), ("domino", "tree"), *((drafter, "draft") for drafter in CACHED)]


@functools.lru_cache
def generator(drafter: str):
    return make_generator(random_models(4, **DRAFTERS[drafter]), **SHAPE, sampling=SamplingParams(0.8, top_k=20))


@functools.lru_cache
def hot_generator(drafter: str):
    return make_generator(random_models(4, **DRAFTERS[drafter]), batch_size=2, sampling=SamplingParams(4.0))


def queue_of(made, mode: str, prompts, noise: int = 0, prefixes: Prefixes | None = None) -> Queue:
    """An open queue in which these prompts wait."""
    queue = Queue(made.generator, made.models, mode, prefixes=prefixes)
    for prompt in prompts:
        queue.add(QueuedRequest(prompt, made.request(noise)))
    return queue


class Chat:
    """Answers prompts one after another with the caches of those before; read: tokens that each prefill took."""

    def __init__(self, made, mode: str, prefixes: Prefixes):
        self.made, self.mode, self.prefixes, self.read = made, mode, prefixes, []

    def ask(self, prompt, noise: int = 0):
        made = self.made
        queue = queue_of(made, self.mode, [prompt], noise, self.prefixes)
        [one] = queue.waiting
        while not one.finish_reason:
            queue.step(3)
        self.read.append(len(prompt) - one.cached)
        [alone] = made.generate([prompt], self.mode, [noise])
        reference = made.divergences([prompt], [alone], [as_answer(one)], [noise])
        assert all(entry.near_tie for entry in reference), reference
        return one


def as_answer(one):
    return Generation(one.token_ids, one.accept_lengths, one.finish_reason)


@pytest.mark.long
@pytest.mark.parametrize(("drafter", "mode"), CASES)
def test_a_second_turn_a_shared_system_prompt_and_an_edited_history_read_only_what_is_new(drafter, mode):
    chat = Chat(generator(drafter), mode, Prefixes(3, 10**9))
    first = chat.ask([*SYSTEM, *FIRST])
    turn = [*SYSTEM, *FIRST, *first.token_ids, *SECOND]
    second = chat.ask(turn, 1)
    chat.ask([*SYSTEM, *OTHER], 2)
    chat.ask([*SYSTEM, *FIRST, *first.token_ids[:6], *OTHER], 3)
    chat.ask([*turn, *second.token_ids, *FIRST], 4)
    # The last token of an answer is in no cache, and the last common one is read again.
    assert chat.read == [40, 22, 21, 21, 22]


@pytest.mark.parametrize("drafter", CACHED)
def test_both_caches_are_those_of_a_prefill_of_the_whole_prompt(drafter):
    made = generator(drafter)
    prefixes = Prefixes(1, 10**9)
    prompts = [[*SYSTEM, *FIRST], [*SYSTEM, *OTHER]]
    queues = [queue_of(made, "draft", [prompt], prefixes=prefixes) for prompt in prompts]
    queues[0].admit()
    while not queues[0].collect()[0].finish_reason:
        queues[0].advance(4)
    [one] = queues[1].admit()
    assert one.cached == 19
    fresh = made.start(prompts[1:], [0])
    state = queues[1].state
    assert (state.anchors[0], state.before[0]) == (fresh.anchors[0], fresh.before[0])
    for reused, whole in zip(*(rows_read(made.models, one, 0, 40) for one in (state, fresh)), strict=True):
        np.testing.assert_allclose(reused, whole, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("schedule", [(3, 3), (0, 0), (0, 3), (3, 0)])
@pytest.mark.parametrize("drafter", CACHED)
def test_after_rounds_of_any_width_both_caches_are_those_of_a_prefill_of_the_text(drafter, schedule):
    """So plain steps extend the drafter's context too."""
    made, prompts = hot_generator(drafter), random_prompts(2, 2, 9)
    state = made.start(prompts, range(2))
    for drafts in schedule:
        state = made.advance(state, "draft", 3, drafts=drafts)
    if schedule in ((3, 3), (0, 0)):
        assert (state.accepts[:, :6].max() > 1) == any(schedule)
    texts = [prompt + state.tokens[row, : state.counts[row]].tolist() for row, prompt in enumerate(prompts)]
    fresh = made.start([text[:-1] for text in texts], range(2))
    assert state.lengths.tolist() == fresh.lengths.tolist() == [len(text) - 1 for text in texts]
    assert state.before.tolist() == fresh.before.tolist() == [text[-2] for text in texts]
    for row, text in enumerate(texts):
        parts = (rows_read(made.models, one, row, len(text) - 1) for one in (state, fresh))
        for looped, read in zip(*parts, strict=True):
            np.testing.assert_allclose(looped, read, atol=1e-4)


def test_the_text_that_was_not_used_for_the_longest_time_goes_first():
    made = generator("domino")
    chat = Chat(made, "draft", Prefixes(2, 10**9))
    for prompt in (FIRST, SECOND, FIRST, OTHER, SECOND, OTHER):
        chat.ask([*prompt, 1, 2])
    assert chat.read == [22, 22, 1, 22, 22, 1]  # the third question left FIRST in, so OTHER drove SECOND out
    size = chat.prefixes.bytes // 2
    chat = Chat(made, "draft", Prefixes(9, size))
    for prompt in (FIRST, SECOND, FIRST):
        chat.ask([*prompt, 1, 2])
    assert chat.read == [22, 22, 22] and chat.prefixes.bytes <= size


def test_an_answer_is_complete_also_when_its_caches_find_no_memory(monkeypatch):
    made, prefixes = generator("domino"), Prefixes(4, 10**9)
    chat = Chat(made, "draft", prefixes)
    chat.ask(FIRST)
    run = Generator.run

    def fails(self, clock, program):
        if program.key[0] == "keep":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return run(self, clock, program)

    monkeypatch.setattr(Generator, "run", fails)
    assert chat.ask(SECOND).finish_reason and not prefixes.texts


def test_a_stream_starts_from_the_text_before_it():
    made, prefixes = generator("domino"), Prefixes(1, 10**9)
    answer = sum((piece.token_ids for piece in made.stream(FIRST, "draft", 3, prefixes=prefixes)), [])
    prompt = [*FIRST, *answer, *SECOND]
    again = sum((piece.token_ids for piece in made.stream(prompt, "draft", 3, prefixes=prefixes)), [])
    assert again == made.generate([prompt], "draft", [0])[0].token_ids
    assert any(key[0] == "prefill" and len(key) == 7 for key in made.compiled)


@pytest.mark.long
def test_requests_that_come_and_go_have_the_texts_that_they_have_alone():
    """The batch grows from one row to four and shrinks again, with greedy and sampled rows, and one is given up."""
    made = generator("domino")
    samplings = (SamplingParams(), SamplingParams(1.2, top_p=0.9), SamplingParams(1.0, 9), SamplingParams(0.7))
    requests = [made.request(Request(index, sampling=samplings[index % 4])) for index in range(9)]
    prompts = random_prompts(9, 3, 30, seed=4)
    queue = queue_of(made, "draft", [])
    queued, sizes = [], set()
    for arrivals in (1, 0, 2, 6, 0, 0):
        for _ in range(arrivals):
            queued.append(QueuedRequest(prompts[len(queued)], requests[len(queued)]))
            queue.add(queued[-1])
        queue.step(1)
        sizes.add(len(queue.rows))
    queue.drop(queued[5])
    queue.drop(queued[8])
    while queue.live() or queue.waiting:
        queue.step(2)
        sizes.add(len(queue.rows))
    assert sizes == {1, 4} and [one.finish_reason for one in queued].count(None) == 2
    rest = [index for index in range(9) if index not in (5, 8)]
    prompts, requests = ([column[index] for index in rest] for column in (prompts, requests))
    reference = made.generate(prompts, "draft", requests)
    answers = [as_answer(queued[index]) for index in rest]
    assert all(entry.near_tie for entry in made.divergences(prompts, reference, answers, requests))
