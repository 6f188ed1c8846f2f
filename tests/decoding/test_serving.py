"""Requests through the rows of a batch: which programs run, how large batch and caches are, and streaming."""

import jax
import pytest

from domino_jax.decoding.requests import Request
from domino_jax.method.settings import SamplingParams, TreeSettings
from tests.helpers.decoding_models import (
    SmallGenerator,
    make_generator,
    random_models,
    random_prompts,
    texts,
)

WARM = SamplingParams(1.0)
PROMPTS = random_prompts(11)
TREE = TreeSettings(nodes=9, lanes=4, candidates=8, beta=-0.1)


def generator(batch: int, **choices) -> SmallGenerator:
    return make_generator(random_models(), batch_size=batch, sampling=WARM, tree=TREE, **choices)


def calls_of(made: SmallGenerator, work) -> list[tuple]:
    """The keys of the programs that `work` runs, in order; all of them are compiled before."""
    work()
    calls, programs = [], dict(made.compiled)
    for key, program in programs.items():
        made.compiled[key] = lambda *given, key=key, program=program: calls.append(key) or program(*given)
    work()
    made.compiled.update(programs)
    return calls


def test_a_row_that_ends_takes_the_next_request_at_once_and_the_host_reads_once_a_dispatch(monkeypatch):
    """Limits 3, 16, 3, 3, 3 on two rows: the short ones follow each other while the long one runs."""
    made = generator(2)
    requests = [Request(index, max_new_tokens=limit) for index, limit in enumerate((3, 16, 3, 3, 3))]

    def work():
        made.generate(PROMPTS[:5], "autoregressive", requests)

    calls = [key[0] for key in calls_of(made, work)]
    assert calls.count("admit") == 3
    # Four short answers and one long one, not two and a half batches of the longest.
    assert calls.count("autoregressive") <= 5
    reads, read = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or read(tree))
    work()
    assert len(reads) == calls.count("autoregressive")


@pytest.mark.parametrize("mode", ["autoregressive", "draft", "tree"])
def test_a_stream_is_the_answer_in_pieces_by_the_same_programs(mode):
    made = generator(4)  # one prompt is answered in one row
    [whole] = made.generate([PROMPTS[2]], mode, [2])
    compiled = set(made.compiled)
    for chunk in (1, 3):
        pieces = list(made.stream(PROMPTS[2], mode, chunk, 2))
        assert sum((piece.token_ids for piece in pieces), []) == whole.token_ids
        assert sum((piece.accept_lengths for piece in pieces), []) == whole.accept_lengths
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert len(pieces[0].token_ids) == 1  # the prefill's token is there before any round
        assert all(len(piece.accept_lengths) <= chunk for piece in pieces)
    assert set(made.compiled) == compiled


# ------------------------------------------------------------------------------------------------ rows of a batch


@pytest.mark.long
def test_a_batch_shrinks_to_a_quarter_and_admits_an_eighth_of_its_rows_at_a_time():
    """25 prompts on sixteen rows: two at a time while two wait, the last one alone, and the texts of single rows."""
    prompts = (PROMPTS * 3)[:25]
    limits = (3, 20, 4, 1, 5, 16, 2, 4, 6, 5, 7)
    requests = [Request(index, max_new_tokens=min(limits[index % 11], 16)) for index in range(25)]
    made = generator(16)
    alone = generator(1).generate(prompts, "draft", requests)
    assert texts(made.generate(prompts, "draft", requests)) == texts(alone)
    assert {key[3] for key in made.compiled if key[0] == "admit"} == {1, 2}
    assert {key[1] for key in made.compiled if key[0] == "draft"} == {16, 4, 1}
    small = generator(16)
    small.generate(prompts[:2], "draft", requests[:2])  # few requests start in a small batch
    assert {key[1] for key in small.compiled if key[0] == "draft"} <= {4, 1}


# ------------------------------------------------------------------------------------------------ slots of caches


def test_a_short_answer_compiles_no_more_than_a_prefill_and_its_rounds():
    made = make_generator(random_models(), cache_length=8_192, max_new_tokens=16)
    made.generate([[7, 8]], "draft")
    assert [key[0] for key in made.compiled] == ["prefill", "draft"]
    assert {key[2] for key in made.compiled if key[0] == "draft"} == {256}


def test_in_fixed_shape_batch_and_caches_keep_one_size_in_every_mode():
    """Sums over other sizes may round otherwise, and modes end rows after different numbers of rounds."""
    shape = {"batch_size": 8, "smallest_cache": 16, "max_new_tokens": 32}
    made = make_generator(random_models(), **shape, sampling=WARM, parity="fixed_shape")
    plain, fast = (texts(made.generate(PROMPTS, mode)) for mode in ("autoregressive", "draft"))
    assert {key[1:3] for key in made.compiled if key[0] in ("autoregressive", "draft")} == {(8, 64)}
    assert plain == fast
