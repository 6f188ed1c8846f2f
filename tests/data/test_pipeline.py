"""pipeline.py: fixed shapes, each usable row once an epoch, and each process' part of the global batches."""

import json

import numpy as np
import pytest
import transformers

from domino_jax.data import index
from domino_jax.runtime.errors import DataError
from tests.helpers.data_files import batches_of, row, rows_of, take, write_rows
from tests.helpers.paths import ASSETS

TINY_TARGET = ASSETS / "tiny_qwen3"


@pytest.fixture
def file(tmp_path):
    """Ten rows; rows 3 and 7 have no two supervised tokens in a row."""
    rows = rows_of([3 + place for place in range(10)])
    rows[3]["loss_mask"] = [1, 0, 1, 0, 1, 0]
    rows[7]["loss_mask"] = [0] * 10
    return write_rows(tmp_path, rows)


def ids_of(batches):
    return [int(entry) for batch in batches for entry in batch["row_ids"]]


def tiny_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY_TARGET, local_files_only=True)


def test_a_batch_has_the_documented_shape_and_padding(tmp_path):
    file = write_rows(tmp_path, [row(10, 3), row(20, 6)])
    [batch] = take(batches_of(file, max_length=4, batch_size=2), 1)
    assert {key: (type(value), value.shape, value.dtype.name) for key, value in batch.items()} == {
        "tokens": (np.ndarray, (2, 4), "int32"),
        "loss_mask": (np.ndarray, (2, 4), "float32"),
        "row_ids": (np.ndarray, (2,), "int32"),
    }
    order = np.argsort(batch["row_ids"])
    assert batch["tokens"][order].tolist() == [[10, 11, 12, 0], [20, 21, 22, 23]]
    assert batch["loss_mask"][order].tolist() == [[0, 1, 1, 0], [0, 1, 1, 1]]


def test_rows_without_anchors_are_left_out_and_counted(file):
    lines = []
    batches_of(file, report=lines.append)
    assert lines == [
        f"{file}: 8 of 10 rows are trained on, 2 have no anchor",
        # 3, 4, 5, 7 and four rows of 8 tokens in eight places of 8
        "layout pad: 79.7% of a batch's tokens are text, 1 rows in each of its places",
    ]


def test_rows_of_all_files_have_token_counts_and_lines(tmp_path):
    file = write_rows(tmp_path, rows_of([3, 4, 12]), "a.jsonl")
    # A blank line after the first row, and no newline at the end.
    file.write_bytes(file.read_bytes().replace(b"\n", b"\n\n", 1).removesuffix(b"\n"))
    second = write_rows(tmp_path, [row(0, 3, [0, 0, 0]), row(0, 3)], "b.jsonl")
    rows = batches_of(tmp_path / "?.jsonl").rows
    counts = rows.counts()
    assert (counts["rows"], counts["tokens"], counts["supervised_tokens"]) == (4, 3 + 4 + 8 + 3, 2 + 3 + 7 + 2)
    assert [rows.where(row_id) for row_id in range(4)] == [*(f"{file}:{line}" for line in (1, 3, 4)), f"{second}:1"]
    assert [rows[place][0] for place in range(4)] == [0, 1, 2, 4]
    assert rows[1][1].token_ids.tolist() == [100, 101, 102, 103] and rows[1][1].loss_mask.tolist() == [0, 1, 1, 1]


def test_truncation_comes_before_the_filter(tmp_path):
    file = write_rows(tmp_path, [row(0, 6, [0, 0, 0, 0, 1, 1]), row(0, 6)])
    rows = batches_of(file, max_length=4).rows
    assert (len(rows), rows.num_skipped, rows[0][0]) == (1, 1, 1)


def test_the_order_follows_from_the_seed_and_is_another_one_each_epoch(file):
    first, again, other = (ids_of(take(batches_of(file, seed=seed), 4)) for seed in (1, 1, 2))
    assert first == again and first != other
    assert first[:8] != first[8:16]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0, 4, [0, 0, 0, 0])], "none of its 1 rows .*\n.*config.data.regenerate=True"),
        ([], "hold no rows"),
        ([row(0, 3), {"token_ids": [1, 2], "loss_mask": [1]}], "rows.jsonl:2: token_ids has 2 entries"),
        ([row(0, 3), row(9, 3)], "rows.jsonl:2: token id 11 is outside the target's 11 embedding rows"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_file_and_line(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        batches_of(write_rows(tmp_path, rows), vocab_size=11)


def test_a_stored_index_is_read_and_a_damaged_one_is_built_again(file, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = batches_of(file, cache=cache)
    [kept] = cache.glob("index-*.npz")
    with monkeypatch.context() as patch:
        patch.setattr(index, "_measure", None)
        again = batches_of(file, cache=cache)
    assert again.fingerprint == first.fingerprint and again.rows.lengths.tolist() == first.rows.lengths.tolist()
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    for damaged in (data, b""):
        kept.write_bytes(damaged)
        assert batches_of(file, cache=cache).rows.lengths.tolist() == first.rows.lengths.tolist()
    assert [path.name for path in cache.iterdir()] == [kept.name]


# ---------------------------------------------------------------- rows that cannot be used


def test_all_bad_rows_are_listed_in_one_message_or_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "LINES_PER_TASK", 4)
    good, bad = row(0, 4), {"token_ids": [1], "loss_mask": [2]}
    file = write_rows(tmp_path, [good, bad, good, *[bad] * 11, {"messages": 3}, good])
    cache = tmp_path / "cache"
    with pytest.raises(DataError) as refused:
        batches_of(file, cache=cache)
    message = str(refused.value)
    assert all(part in message for part in ("13 of 16 rows", "rows.jsonl:2", "rows.jsonl:4", "rows.jsonl:5"))
    assert "data.skip_bad_rows" in message and len(message.splitlines()) <= 5
    reports = []
    rows = batches_of(file, cache=cache, skip_bad=True, report=reports.append).rows
    assert (len(rows), rows.num_read, rows.num_bad) == (3, 3, 13) and "13 more cannot be used" in reports[0]
    assert [rows.where(number) for number in range(3)] == [f"{file}:{line}" for line in (1, 3, 16)]
    with pytest.raises(DataError, match="13 of 16 rows"):  # whatever is stored
        batches_of(file, cache=cache)


# ---------------------------------------------------------------- the index


def test_a_line_with_answers_in_several_rows_gives_each_once_an_epoch_and_one_prompt(tmp_path):
    """As conversations whose thoughts are left out of the history: two rows on every second line."""
    lines = [row(100 * place, 4) for place in range(20)]
    for place in range(0, 20, 2):
        lines[place]["earlier_turns"] = [{"token_ids": [100 * place, 7, 8], "loss_mask": [0, 1, 1]}]
    file = write_rows(tmp_path, lines)
    batches = batches_of(file, batch_size=5)
    rows = batches.rows
    assert (len(rows), rows.where(0), rows.where(1), rows.where(2)) == (30, f"{file}:1", f"{file}:1", f"{file}:2")
    assert [rows[place][1].token_ids.tolist() for place in (0, 1, 2)] == [
        [0, 7, 8],
        [0, 1, 2, 3],
        [100, 101, 102, 103],
    ]
    assert sorted(ids_of(take(batches, 6))) == list(range(30))
    again = batches_of(file, batch_size=5, rows=slice(3, 5))  # the second of two processes continues
    state = None
    with batches.start() as iterator:
        for _ in range(4):
            next(iterator)
        state = iterator.state()
    np.testing.assert_array_equal(take(again, 1, state)[0]["tokens"], take(batches, 1, state)[0]["tokens"][3:])
    held_out = batches_of(file, held_out=2).rows
    for prompt in held_out.held_out_prompts():
        [first] = prompt["token_ids"]
        assert prompt["id"] == f"{file}:{first // 100 + 1}"
        texts = [held_out[place][1].token_ids[0] for place in range(len(held_out))]
        assert first not in texts


def test_the_fingerprint_changes_with_every_byte_and_every_choice(tmp_path):
    def fingerprint(text, name="rows.jsonl", template=None, **changes):
        file = write_rows(tmp_path, [], name)
        file.write_text(text)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template or tokenizer.chat_template
        return batches_of(file, tokenizer, **changes).fingerprint

    text = json.dumps(row(0, 4)) + "\n"
    base = fingerprint(text)
    assert fingerprint(text, "another_name.jsonl") == base
    other = [
        fingerprint(text + "\n"),
        fingerprint(text.replace("3", "4", 1)),
        fingerprint(text, template="{{ messages }}"),
        fingerprint(text, max_length=7),
        fingerprint(text, thinking=True),
    ]
    assert len({base, *other}) == 6
