"""Resuming is exact with any number of processes and any batch size; failures are reported by file and line."""

import collections
import json

import numpy as np
import pytest

from domino_jax.runtime.errors import DataError
from tests.helpers.data_files import batches_of, rows_of, take, write_rows

LAYOUTS = ("pad", "pack")
LENGTHS = [3 + place * 5 % 6 for place in range(50)]  # 3 to 8


@pytest.fixture
def file(tmp_path):
    return write_rows(tmp_path, rows_of(LENGTHS))


def of_layout(file, layout, **changes):
    return batches_of(file, **{"kind": layout, "window": 24} | changes)


def assert_same(expected, given):
    for one, other in zip(expected, given, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


def rows_in(batch):
    """The ids of all rows of a batch in order; each token names its row."""
    starts = batch["positions"] == 0 if "positions" in batch else np.arange(batch["tokens"].shape[1])[None] == 0
    present = starts & (batch["documents"] > 0) if "documents" in batch else starts
    return (batch["tokens"][np.broadcast_to(present, batch["tokens"].shape)] // 100).tolist()


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_comes_exactly_once_an_epoch(file, layout):
    batches = of_layout(file, layout, batch_size=1, window=25)  # two windows are an epoch
    seen = []
    with batches.start() as iterator:
        while len(seen) < 100:
            seen += rows_in(next(iterator))
    for epoch in (seen[:50], seen[50:]):
        assert collections.Counter(epoch) == dict.fromkeys(range(50), 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_continues_exactly_with_any_number_of_processes(file, layout):
    uninterrupted = take(of_layout(file, layout), 20)
    with of_layout(file, layout, rows=slice(2, 4)).start() as iterator:  # the second of two processes
        for _ in range(11):
            next(iterator)
        state = json.loads(json.dumps(iterator.state()))
    assert_same(uninterrupted[11:], take(of_layout(file, layout), 9, state))
    for place in range(4):  # now four
        part = take(of_layout(file, layout, rows=slice(place, place + 1)), 9, state)
        assert_same(
            [{key: value[place : place + 1] for key, value in batch.items()} for batch in uninterrupted[11:]], part
        )


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b'{"token_ids": 3}', "rows.jsonl:8: token_ids is 3"),
        (b'{"token_ids": [1, 2', "rows.jsonl:8: the line is not a JSON"),
        (b'{"token_ids": [1, 2], "loss_mask": [1, 1]}', "rows.jsonl:8: the row has 2 tokens, and 8 when the run"),
    ],
)
def test_a_row_that_breaks_during_the_run_is_named_by_file_and_line(file, broken, message):
    batches = of_layout(file, "pad")
    lines = file.read_bytes().split(b"\n")
    lines[7] = broken.ljust(len(lines[7]))
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=message), batches.start() as iterator:
        for _ in range(13):
            next(iterator)
