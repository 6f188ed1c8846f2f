"""sources.py: every form of data gives the same rows; a bad file is one message that names it."""

import gzip
import os

import numpy as np
import pytest

from domino_jax.data import sources
from domino_jax.data.prompts import read_jsonl
from domino_jax.data.sources import find_files, open_files
from domino_jax.runtime import remote
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.data_files import batches_of, jsonl, rows_of, take, write_rows

FORMS = ("rows.jsonl", "rows.jsonl.gz")


@pytest.fixture
def put(bucket):
    """A function that writes an object of the bucket and returns its gs:// address."""

    def write(name, data):
        remote.filesystem(bucket).pipe_file(f"{bucket}/{name}", data)
        return f"{bucket}/{name}"

    return write


# ---------------------------------------------------------------- the value of data.train


@pytest.mark.parametrize("name", ["day=3.jsonl", "a,b.jsonl", "[v2] rows.jsonl"])
def test_a_path_that_exists_is_taken_literally(tmp_path, name):
    file = write_rows(tmp_path, rows_of([3]), name)
    assert find_files(str(file)) == [str(file)]


def test_a_glob_names_its_files_in_order_and_no_folders(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        write_rows(tmp_path, rows_of([3]), name)
    (tmp_path / "d.jsonl").mkdir()
    assert find_files(f"{tmp_path}/*.jsonl") == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert find_files(f"{tmp_path}/**/*.jsonl")[-1] == f"{tmp_path}/deep/c.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{0}/none.jsonl", "none.jsonl: there is no such file"),
        ("{0}/*.none", r"/\*.none: no file matches"),
        ("{0}", "is a folder; name its files, as .*/\\*.jsonl"),
    ],
)
def test_a_value_that_names_no_files_is_a_usage_error(tmp_path, text, message):
    write_rows(tmp_path, rows_of([3]))
    with pytest.raises(DominoError, match=message) as refused:
        open_files(text.format(tmp_path), tmp_path / "cache")
    assert refused.value.exit_code == 2 and len(str(refused.value).splitlines()) <= 5


# ---------------------------------------------------------------- the forms


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_batches(tmp_path, name):
    rows = rows_of([3, 8, 4, 5, 7])
    plain = batches_of(write_rows(tmp_path, rows, "plain.jsonl"))
    formed = batches_of(write_rows(tmp_path, rows, name))
    for expected, given in zip(take(plain, 5), take(formed, 5), strict=True):
        for key in expected:
            np.testing.assert_array_equal(expected[key], given[key])
    assert formed.rows.where(2) == f"{tmp_path}/{name}:3"


def test_files_of_several_forms_are_one_glob_and_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for place, name in enumerate(("0.jsonl", "1.jsonl.gz", "2.jsonl")):
        write_rows(tmp_path, rows_of([3 + place]), name)
    rows = batches_of("~/?.jsonl*").rows
    assert rows.lengths.tolist() == [3, 4, 5]
    assert len(list(read_jsonl("~/1.jsonl.gz"))) == 1


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n \n"])
def test_the_last_line_counts_with_or_without_a_newline(tmp_path, end):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(jsonl(rows_of([3, 4])).removesuffix(b"\n") + end)
    assert batches_of(file).rows.lengths.tolist() == [3, 4]


@pytest.mark.parametrize("name", FORMS)
def test_prompt_files_may_be_compressed_too(tmp_path, name):
    rows = [{"prompt": "a" * 200_000}, {"prompt": "é"}]
    assert list(read_jsonl(write_rows(tmp_path, rows, name))) == [(1, rows[0]), (2, rows[1])]


# ---------------------------------------------------------------- copies in the cache


def test_an_archive_is_unpacked_once_and_again_when_its_bytes_change(tmp_path, monkeypatch):
    file, cache = write_rows(tmp_path, rows_of([3, 4]), "rows.jsonl.gz"), tmp_path / "cache"
    unpacked = []
    monkeypatch.setattr(sources, "_unpack", lambda *given, real=sources._unpack: (unpacked.append(1), real(*given)))
    batches_of(file, cache=cache)
    batches_of(file, cache=cache)
    assert len(unpacked) == 1
    stat = file.stat()
    write_rows(tmp_path, rows_of([3, 5]), file.name)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the date is unchanged
    assert batches_of(file, cache=cache).rows.lengths.tolist() == [3, 5]
    assert len(unpacked) == 2


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("damage", ["cut", "other", "flipped"])
def test_a_damaged_file_is_one_message_that_names_it(tmp_path, damage):
    name = "rows.jsonl.gz"
    file = write_rows(tmp_path, rows_of([3 + place % 5 for place in range(400)]), name)
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    file.write_bytes({"cut": data[: len(data) // 2], "other": b"plain text " * 9_000, "flipped": data}[damage])
    with pytest.raises(DataError) as refused:
        batches_of(file)
    assert name in str(refused.value) and refused.value.exit_code == 3
    assert len(str(refused.value).splitlines()) <= 2
    with pytest.raises(DataError, match=name):  # as prompts too
        list(read_jsonl(file))


OTHER_KINDS = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a web page": b"<!DOCTYPE html>\n<html>",
    "a Parquet file": b"PAR1\x15\x04",
    "a gzip archive": gzip.compress(b"{}"),
    "a Zstandard archive": b"\x28\xb5\x2f\xfd\x20\x02",
    "a JSON array": b'\xef\xbb\xbf[\n  {"prompt": "a"}\n]',
}


@pytest.mark.parametrize(("kind", "data"), OTHER_KINDS.items(), ids=OTHER_KINDS)
def test_a_file_of_another_kind_is_named_with_what_to_do(tmp_path, kind, data):
    (tmp_path / "rows.jsonl").write_bytes(data)
    for read in (lambda name: list(read_jsonl(name)), batches_of):
        with pytest.raises(DataError, match=kind) as refused:
            read(tmp_path / "rows.jsonl")
        assert "rows.jsonl" in str(refused.value) and len(str(refused.value).splitlines()) == 2
    for packed, name in ((OTHER_KINDS["Git LFS"], "Git LFS"), (gzip.compress(data), kind)):
        (tmp_path / "rows.jsonl.gz").write_bytes(packed)
        with pytest.raises(DataError, match=name):
            batches_of(tmp_path / "rows.jsonl.gz")


# ---------------------------------------------------------------- gs://


@pytest.mark.parametrize("name", FORMS)
def test_a_bucket_is_copied_once_and_read_like_a_folder(tmp_path, put, monkeypatch, name):
    rows = rows_of([3, 8, 4, 5, 7])
    local = write_rows(tmp_path, rows, name)
    address = put(f"data/{name}", local.read_bytes())
    near, far = batches_of(local), batches_of(address, cache=tmp_path / "cache")
    assert far.fingerprint == near.fingerprint
    assert far.rows.where(4) == f"{address}:5"
    for expected, given in zip(take(near, 3), take(far, 3), strict=True):
        np.testing.assert_array_equal(expected["tokens"], given["tokens"])
    monkeypatch.setattr(remote.filesystem(address), "get_file", None)
    assert len(batches_of(address, cache=tmp_path / "cache").rows) == 5


def test_a_bucket_is_globbed_and_holds_prompts(bucket, put, tmp_path):
    address = put("prompts.jsonl", b'{"prompt": "a"}\n')
    assert list(read_jsonl(address)) == [(1, {"prompt": "a"})]
    with pytest.raises(DominoError, match=f"{bucket}/none.jsonl: there is no such file"):
        list(read_jsonl(f"{bucket}/none.jsonl"))
    for place, name in enumerate(("x/b.jsonl", "x/a.jsonl")):
        put(name, jsonl(rows_of([3 + place])))
    assert find_files(f"{bucket}/x/*.jsonl") == [f"{bucket}/x/a.jsonl", f"{bucket}/x/b.jsonl"]
    assert batches_of(f"{bucket}/x/*.jsonl", cache=tmp_path).rows.lengths.tolist() == [4, 3]


def test_a_file_that_was_replaced_in_its_bucket_is_copied_again(put, tmp_path):
    address = put("a.jsonl", jsonl(rows_of([3])))
    assert batches_of(address, cache=tmp_path).rows.lengths.tolist() == [3]
    put("a.jsonl", jsonl(rows_of([4])))  # the same size, in the same second
    assert batches_of(address, cache=tmp_path).rows.lengths.tolist() == [4]
