"""pipeline.py: fixed shapes, each usable row once an epoch, and a position that can be taken up exactly."""

import collections
import json
import pathlib

import numpy as np
import pytest
import transformers

from domino_jax.data.pipeline import TrainingRows, batches, has_anchor, make_dataset
from domino_jax.errors import DataError

TINY_TARGET = pathlib.Path(__file__).resolve().parents[1] / "assets" / "tiny_qwen3"


def write_rows(folder, rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def row(first, length, mask=None):
    return {"token_ids": list(range(first, first + length)), "loss_mask": mask or [0] + [1] * (length - 1)}


@pytest.fixture
def file(tmp_path):
    """Ten rows; rows 3 and 7 have no two supervised tokens in a row."""
    rows = [row(100 * place, 3 + place) for place in range(10)]
    rows[3]["loss_mask"] = [1, 0, 1, 0, 1, 0]
    rows[7]["loss_mask"] = [0] * 10
    return write_rows(tmp_path, rows)


def dataset_of(file, seed=0, batch_size=4):
    return make_dataset(
        file, None, max_length=8, batch_size=batch_size, seed=seed, thinking=False, report=lambda text: None
    )


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


def test_a_batch_has_the_documented_shape_and_padding(tmp_path):
    file = write_rows(tmp_path, [row(10, 3), row(20, 6)])
    dataset = make_dataset(file, None, max_length=4, batch_size=2, seed=0, thinking=False, report=lambda text: None)
    batch = next(iter(dataset))
    assert {key: (value.shape, value.dtype.name) for key, value in batch.items()} == {
        "tokens": ((2, 4), "int32"),
        "loss_mask": ((2, 4), "float32"),
        "row_ids": ((2,), "int32"),
    }
    order = np.argsort(batch["row_ids"])
    assert batch["tokens"][order].tolist() == [[10, 11, 12, 0], [20, 21, 22, 23]]
    assert batch["loss_mask"][order].tolist() == [[0, 1, 1, 0], [0, 1, 1, 1]]


def test_an_anchor_is_two_supervised_tokens_in_a_row():
    assert has_anchor(np.array([0, 1, 1.0]))
    assert not has_anchor(np.array([1, 0, 1.0]))
    assert not has_anchor(np.array([1.0]))


def test_rows_without_anchors_are_left_out_and_counted(file):
    said = []
    make_dataset(file, None, max_length=8, batch_size=4, seed=0, thinking=False, report=said.append)
    assert said == [f"{file}: 8 of 10 rows are trained on, 2 have no anchor"]


def test_truncation_comes_before_the_filter(tmp_path):
    file = write_rows(tmp_path, [row(0, 6, [0, 0, 0, 0, 1, 1]), row(0, 6)])
    rows = TrainingRows(file, None, max_length=4, thinking=False)
    assert (len(rows), rows.num_skipped, rows[0][0]) == (1, 1, 1)


def test_every_usable_row_comes_once_an_epoch_in_another_order(file):
    stream = [int(entry) for batch in take(iter(dataset_of(file)), 6) for entry in batch["row_ids"]]
    epochs = [stream[0:8], stream[8:16], stream[16:24]]
    usable = collections.Counter([0, 1, 2, 4, 5, 6, 8, 9])
    assert all(collections.Counter(epoch) == usable for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_follows_from_the_seed(file):
    first, again, other = (np.stack([b["row_ids"] for b in take(iter(dataset_of(file, s)), 4)]) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_restored_iterator_continues_exactly_in_the_middle_of_an_epoch(file):
    uninterrupted = iter(dataset_of(file, batch_size=3))
    take(uninterrupted, 63)
    state = json.loads(json.dumps(uninterrupted.get_state()))
    rest = take(uninterrupted, 5)
    resumed = iter(dataset_of(file, batch_size=3))
    resumed.set_state(state)
    for expected, given in zip(rest, take(resumed, 5), strict=True):
        for key in expected:
            np.testing.assert_array_equal(expected[key], given[key])


def test_a_batch_larger_than_the_data_wraps_around(tmp_path):
    rows = TrainingRows(write_rows(tmp_path, [row(0, 3)]), None, max_length=4, thinking=False)
    assert next(iter(batches(rows, max_length=4, batch_size=3, seed=0)))["row_ids"].tolist() == [0, 0, 0]


def test_data_without_answers_is_refused_with_the_way_out(tmp_path):
    file = write_rows(tmp_path, [row(0, 4, [0, 0, 0, 0])])
    with pytest.raises(DataError, match="config.data.regenerate=True"):
        dataset_of(file)
    with pytest.raises(DataError, match="none of its 0 rows"):
        dataset_of(write_rows(tmp_path, []))


def test_a_broken_row_is_named_by_its_line(tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl:2: token_ids has 2 entries"):
        dataset_of(write_rows(tmp_path, [row(0, 3), {"token_ids": [1, 2], "loss_mask": [1]}]))


def test_an_id_outside_the_embedding_is_named_by_its_line(tmp_path):
    file = write_rows(tmp_path, [row(0, 3), row(9, 3)])
    with pytest.raises(DataError, match=r"rows.jsonl:2: token id 11 is outside the target's 11 embedding rows"):
        make_dataset(file, None, max_length=4, batch_size=1, seed=0, thinking=False, vocab_size=11)


def test_conversations_pass_through_the_tiny_targets_own_template(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY_TARGET, local_files_only=True)
    messages = [{"role": "user", "content": "Name it."}, {"role": "assistant", "content": "def f(x): pass"}]
    rows = TrainingRows(write_rows(tmp_path, [{"messages": messages}]), tokenizer, max_length=64, thinking=False)
    _, only = rows[0]
    said = tokenizer.decode(only.token_ids[only.loss_mask > 0])
    assert said == "def f(x): pass<|im_end|>"
    before = tokenizer.decode(only.token_ids[: int(np.argmax(only.loss_mask))])
    assert before.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
