"""Resuming is exact with any number of workers and processes; failures in workers are reported and leave nothing."""

import collections
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.data_files import batches_of, rows_of, take, write_rows
from tests.helpers.paths import ROOT

LAYOUTS = ("pad", "pack", "buckets")
# Workers take seconds to start, so one layout represents all: the same code reads each of them.
LAYOUTS_AND_WORKERS = (("pad", 0), ("pack", 0), ("buckets", 0), ("pack", 2))
LENGTHS = [3 + place * 5 % 6 for place in range(50)]  # 3 to 8


@pytest.fixture
def file(tmp_path):
    return write_rows(tmp_path, rows_of(LENGTHS))


def of_layout(file, layout, **changes):
    return batches_of(file, **{"kind": layout, "buckets": (4, 6, 8), "window": 24} | changes)


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


def assert_gone(pids, seconds=30):
    """Within `seconds` no process, zombies included, has one of these ids."""
    deadline = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        multiprocessing.active_children()  # reaps processes that Grain had to kill
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize(("layout", "workers"), LAYOUTS_AND_WORKERS)
def test_after_63_batches_the_rest_equals_the_uninterrupted_stream(file, layout, workers):
    batches = of_layout(file, layout, workers=workers)
    with batches.start() as iterator:
        stream = [next(iterator) for _ in range(63)]
        state = json.loads(json.dumps(iterator.state()))
        stream += [next(iterator) for _ in range(12)]
    assert_same(stream[63:], take(of_layout(file, layout, workers=workers), 12, state))
    assert_same(stream, take(of_layout(file, layout), 75))  # workers change nothing


@pytest.mark.parametrize(("layout", "workers"), LAYOUTS_AND_WORKERS)
def test_every_row_comes_exactly_once_an_epoch(file, layout, workers):
    batches = of_layout(file, layout, batch_size=1, window=25, workers=workers)  # two windows are an epoch
    seen = []
    with batches.start() as iterator:
        while len(seen) < 100:
            seen += rows_in(next(iterator))
    for epoch in (seen[:50], seen[50:]):
        assert collections.Counter(epoch) == dict.fromkeys(range(50), 1)


def test_a_position_before_the_first_batch_is_the_beginning(file):
    batches = of_layout(file, "pack")
    with batches.start() as iterator:
        state = iterator.state()
    assert_same(take(batches, 3), take(batches, 3, state))


def test_another_worker_count_continues_exactly(file):
    layout = "buckets"
    uninterrupted = take(of_layout(file, layout), 14)
    with of_layout(file, layout, workers=2).start() as iterator:
        first = [next(iterator) for _ in range(7)]
        state = iterator.state()
    assert_same(uninterrupted[:7], first)
    assert_same(uninterrupted[7:], take(of_layout(file, layout, workers=3), 7, state))
    assert_same(uninterrupted[7:], take(of_layout(file, layout), 7, state))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_number_of_processes_continues_exactly(file, layout):
    uninterrupted = take(of_layout(file, layout), 20)
    with of_layout(file, layout, rows=slice(2, 4)).start() as iterator:  # the second of two processes
        for _ in range(11):
            next(iterator)
        state = iterator.state()
    for place in range(4):  # now four
        part = take(of_layout(file, layout, rows=slice(place, place + 1)), 9, state)
        assert_same(
            [{key: value[place : place + 1] for key, value in batch.items()} for batch in uninterrupted[11:]], part
        )


@pytest.mark.parametrize("layout", ["pad", "pack"])
def test_another_batch_size_continues_at_the_same_place(file, layout):
    fours = take(of_layout(file, layout), 12)
    with of_layout(file, layout).start() as iterator:
        for _ in range(5):
            next(iterator)
        state = iterator.state()
    sevens = take(of_layout(file, layout, batch_size=7), 4, state)
    for key in fours[0]:
        np.testing.assert_array_equal(
            np.concatenate([batch[key] for batch in fours[5:]]), np.concatenate([batch[key] for batch in sevens])
        )


@pytest.mark.parametrize("batches_before", [0, 1, 5, 6, 9])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 40])
def test_another_batch_size_neither_loses_nor_repeats_rows_in_buckets(file, batches_before, batch_size):
    settings = {"kind": "buckets", "buckets": (4, 6, 8), "window": 24}
    with batches_of(file, **settings).start() as iterator:
        before = [next(iterator) for _ in range(batches_before)]
        state = iterator.state()
    after = take(batches_of(file, **settings, batch_size=batch_size), 120 // batch_size, state)
    # Up to the end of the current window the rows are those of the old batch size.
    left = state["rows"] - state["item"]
    old = [row for batch in take(batches_of(file, **settings), batches_before + left // 4) for row in rows_in(batch)]
    new = [row for batch in [*before, *after] for row in rows_in(batch)]
    assert new[: len(old)] == old
    # After it come windows of the endless order, each with every row once.
    position = of_layout(file, "pad", batch_size=1)
    plain = [row for batch in take(position, len(new)) for row in rows_in(batch)]
    window_ends = [end for end in range(1, len(new) + 1) if sorted(new[:end]) == sorted(plain[:end])]
    assert window_ends[-1] > len(new) - 48


def test_buckets_stay_aligned_after_a_change_of_the_batch_size(tmp_path):
    file = write_rows(tmp_path, rows_of([3, 8] * 40))
    settings = {"kind": "buckets", "buckets": (4, 8), "window": 40}
    with batches_of(file, **settings).start() as iterator:
        next(iterator)
        state = iterator.state()
    after = take(batches_of(file, **settings, batch_size=5), 24, state)
    mixed = [len({row % 2 for row in rows_in(batch)}) > 1 for batch in after]
    assert sum(mixed[8:]) <= 2  # one where the two buckets meet in each window, and no more


@pytest.mark.parametrize(
    "state", [{"next_index": 3}, {"first": 0, "rows": 0, "batch_size": 4, "item": 0}, {"first": -1}]
)
def test_a_state_of_another_form_is_refused(file, state):
    with pytest.raises(DataError, match="the data position"):
        of_layout(file, "pad").start(state)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("workers", "broken", "message"),
    [
        (0, b'{"token_ids": 3}', "rows.jsonl:8: token_ids is 3"),
        (2, b'{"token_ids": 3}', "rows.jsonl:8: token_ids is 3"),
        (0, b'{"token_ids": [1, 2', "rows.jsonl:8: the line is not a JSON"),
        (0, b'{"token_ids": [1, 2], "loss_mask": [1, 1]}', "rows.jsonl:8: the row has 2 tokens, and 8 when the run"),
    ],
)
def test_a_row_that_breaks_during_the_run_is_named_by_file_and_line(file, workers, broken, message):
    batches = of_layout(file, "pad", workers=workers)
    lines = file.read_bytes().split(b"\n")
    lines[7] = broken.ljust(len(lines[7]))
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=message), batches.start() as iterator:
        for _ in range(13):
            next(iterator)
    assert_gone([worker.pid for worker in multiprocessing.active_children()])
    with pytest.raises(DominoError, match="the data is closed"):
        next(iterator)


@pytest.mark.parametrize("batches_before", [2, 9])  # two: both workers run
def test_a_killed_worker_is_an_error_within_seconds_and_leaves_no_process(file, batches_before):
    with of_layout(file, "pack", workers=2).start() as iterator:
        for _ in range(batches_before):
            next(iterator)
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        os.kill(workers[0].pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(DominoError, match="a data worker process ended .*exit code -9"):
            while time.monotonic() < killed + 60:
                next(iterator)
        assert time.monotonic() - killed < 10
    assert_gone([worker.pid for worker in workers])


def test_closing_ends_the_workers(file):
    iterator = of_layout(file, "pad", workers=2).start()
    next(iterator), next(iterator)
    workers = [worker.pid for worker in multiprocessing.active_children()]
    iterator.close()
    iterator.close()
    assert len(workers) == 2
    assert_gone(workers)


READER = """
import sys
from tests.helpers.data_files import batches_of

if __name__ == "__main__":
    import multiprocessing
    iterator = batches_of(sys.argv[1], workers=2).start()
    next(iterator), next(iterator)  # one of each worker
    print(*(worker.pid for worker in multiprocessing.active_children()), flush=True)
    for _ in sys.stdin:
        for _ in range(20):
            next(iterator)
        print("read", flush=True)
    iterator.close()
"""


@pytest.fixture
def reader(file, tmp_path):
    """A process that reads with two workers: (process, the workers' ids). A line of input makes it continue."""
    script = tmp_path / "reader.py"
    script.write_text(READER)
    process = subprocess.Popen(
        [sys.executable, script, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    yield process, [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.communicate()


def test_workers_end_with_a_killed_run(reader):
    process, workers = reader
    assert len(workers) == 2
    process.kill()
    process.wait()
    assert_gone(workers)


def test_workers_continue_when_a_signal_reaches_the_whole_group(reader):
    process, workers = reader
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGHUP)
        os.kill(pid, signal.SIGINT)
    out, _ = process.communicate("go on\n", timeout=120)
    assert out == "read\n" and process.returncode == 0
    assert_gone(workers)
