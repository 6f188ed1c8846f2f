"""Requests through the rows of a batch: rows that are used again, requests of their own kind, and streaming."""

import functools

import jax
import numpy as np
import pytest

from domino_jax.decoding.requests import Request
from domino_jax.method.settings import SamplingParams
from domino_jax.runtime.errors import DataError
from tests.helpers.decoding_models import (
    SmallGenerator,
    check_lossless,
    make_generator,
    random_models,
    random_prompts,
    texts,
)

GREEDY, WARM = SamplingParams(), SamplingParams(1.0)
PROMPTS = random_prompts(11)


@functools.lru_cache
def generator(batch: int, **choices) -> SmallGenerator:
    return make_generator(random_models(), batch_size=batch, sampling=WARM, **choices)


def calls_of(made: SmallGenerator, work) -> list[str]:
    """The names of the programs that `work` runs, in order; all of them are compiled before."""
    work()
    calls, programs = [], dict(made.compiled)
    for key, program in programs.items():
        made.compiled[key] = lambda *given, key=key, program=program: calls.append(key[0]) or program(*given)
    work()
    made.compiled.update(programs)
    return calls


@pytest.mark.parametrize("mode", ["autoregressive", "domino"])
def test_a_request_that_waits_for_a_row_has_the_text_of_its_solo_run(mode):
    together = generator(3).generate(PROMPTS, mode)
    alone = [generator(1).generate([prompt], mode, [index])[0] for index, prompt in enumerate(PROMPTS)]
    assert texts(together) == texts(alone)
    assert len({len(answer.accept_lengths) for answer in together}) > 1 or mode == "autoregressive"


def test_a_row_that_ends_takes_the_next_request_at_once():
    """Limits 3, 16, 3, 3, 3 on two rows: the short ones follow each other while the long one runs."""
    made = generator(2)
    requests = [Request(index, max_new_tokens=limit) for index, limit in enumerate((3, 16, 3, 3, 3))]
    calls = calls_of(made, lambda: made.generate(PROMPTS[:5], "autoregressive", requests))
    assert calls.count("admit") == 3
    assert calls[:3] == ["prefill", "autoregressive", "prefill"]
    # Four short answers and one long one, not two and a half batches of the longest.
    assert calls.count("autoregressive") <= 5


def test_one_host_read_per_dispatch_of_rounds(monkeypatch):
    made = generator(3)
    calls = calls_of(made, lambda: made.generate(PROMPTS, "domino"))
    reads = []
    read = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or read(tree))
    made.generate(PROMPTS, "domino")
    assert len(reads) == calls.count("draft")


def test_a_queue_is_lossless_whatever_the_mode():
    check_lossless(generator(3), PROMPTS)


def test_a_request_has_its_own_limit_and_seed():
    made = generator(2)
    requests = [Request(0, max_new_tokens=5), Request(0, seed=7), Request(0)]
    short, seeded, plain = made.generate([PROMPTS[0]] * 3, "domino", requests)
    assert short.token_ids == plain.token_ids[:5] and short.finish_reason == "length"
    other = make_generator(random_models(), sampling=WARM, seed=7)
    assert seeded.token_ids == other.generate([PROMPTS[0]], "domino")[0].token_ids != plain.token_ids


MIXED = [GREEDY, SamplingParams(1.3, top_p=0.8), SamplingParams(1.0, 9, 0.9, 0.05)]


def test_requests_of_different_kinds_share_a_batch_and_keep_their_texts():
    requests = [Request(index, sampling=sampling) for index, sampling in enumerate(MIXED)]
    together = generator(3).generate(PROMPTS[:3], "domino", requests)
    for index, sampling in enumerate(MIXED):
        own = make_generator(random_models(), sampling=sampling)
        assert own.generate([PROMPTS[index]], "domino", [index])[0].token_ids == together[index].token_ids, sampling


def test_what_requests_sample_is_compared_once_and_not_at_each_admission(monkeypatch):
    """Two rows serve ten requests, one of which samples otherwise."""
    compared = []
    equal = SamplingParams.__eq__
    requests = [Request(index, max_new_tokens=2, sampling=GREEDY) for index in range(9)]
    requests.append(Request(9, max_new_tokens=2, sampling=MIXED[1]))
    made = make_generator(random_models(), batch_size=2)
    monkeypatch.setattr(SamplingParams, "__eq__", lambda one, two: compared.append(1) or equal(one, two))
    answers = made.generate([[7]] * 10, "autoregressive", requests)
    assert all(len(answer.token_ids) == 2 for answer in answers) and len(compared) <= 10


def test_a_request_for_more_than_the_buffer_is_refused():
    with pytest.raises(DataError, match="asks for 17 new tokens, but the buffer holds 1 to 16"):
        generator(1).generate([[7]], "domino", [Request(0, max_new_tokens=17)])


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("mode", ["autoregressive", "domino"])
def test_a_stream_is_the_answer_in_pieces(mode, chunk):
    made = generator(1)
    pieces = list(made.stream(PROMPTS[2], mode, chunk, 2))
    [whole] = made.generate([PROMPTS[2]], mode, [2])
    assert sum((piece.token_ids for piece in pieces), []) == whole.token_ids
    assert sum((piece.accept_lengths for piece in pieces), []) == whole.accept_lengths
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len(pieces[0].token_ids) == 1  # the prefill's token is there before any round
    assert all(len(piece.accept_lengths) <= chunk for piece in pieces)


def test_a_stream_runs_the_program_of_a_whole_answer():
    made = generator(1)
    made.generate([PROMPTS[0]], "domino")
    kept = set(made.compiled)
    calls = calls_of(made, lambda: list(made.stream(PROMPTS[0], "domino", 2)))
    assert set(made.compiled) == kept
    assert calls[0] == "prefill" and set(calls[1:]) == {"draft"}


def test_a_stream_of_a_batched_generator_has_one_row():
    assert sum((piece.token_ids for piece in generator(3).stream([7, 8], "domino")), []) == (
        generator(1).generate([[7, 8]], "domino")[0].token_ids
    )


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_fewer_drafts_change_no_token_and_emit_fewer_at_once(num_drafts):
    narrow = generator(3, num_drafts=num_drafts)
    answers = narrow.generate(PROMPTS, "domino")
    assert texts(answers) == texts(generator(3).generate(PROMPTS, "domino"))
    longest = max(length for answer in answers for length in answer.accept_lengths)
    assert 1 < longest <= num_drafts + 1


@pytest.mark.parametrize(("tau", "lengths"), [(1.0, {1}), (2.5, {2, 3}), (5.0, {5})])
def test_a_simulated_acceptance_length_is_kept(tau, lengths):
    made = make_generator(random_models(), sampling=GREEDY, simulated_tau=tau, max_new_tokens=33)
    [answer] = made.generate([[7, 8]], "domino")
    rounds = answer.accept_lengths[:-1]  # the last one is cut by the limit
    assert set(rounds) == lengths
    assert np.mean(rounds) == pytest.approx(tau, abs=1 / len(rounds))
