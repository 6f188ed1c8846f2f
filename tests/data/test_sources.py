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


def test_a_glob_names_its_files_in_order_and_no_folders_and_an_existing_path_is_no_glob(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        write_rows(tmp_path, rows_of([3]), name)
    (tmp_path / "d.jsonl").mkdir()
    assert find_files(f"{tmp_path}/*.jsonl") == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert find_files(f"{tmp_path}/**/*.jsonl")[-1] == f"{tmp_path}/deep/c.jsonl"
    file = write_rows(tmp_path, rows_of([3]), "[v2] rows.jsonl")
    assert find_files(str(file)) == [str(file)]


def test_files_that_commands_keep_beside_rows_match_no_glob(tmp_path, caplog):
    for name in ("rows.jsonl", "rows.jsonl.part-0-of-2.jsonl", "rows.jsonl.part-1-of-2.jsonl", "rows.jsonl.meta.json"):
        write_rows(tmp_path, rows_of([3]), name)
    for pattern in ("*.jsonl", "rows.jsonl*", "**/*"):
        assert find_files(f"{tmp_path}/{pattern}") == [f"{tmp_path}/rows.jsonl"]
    assert "rows.jsonl.part-0-of-2.jsonl is a part of a regeneration that was not finished" in caplog.text
    named = f"{tmp_path}/rows.jsonl.part-1-of-2.jsonl"
    assert find_files(named) == [named]
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DominoError, match="no file matches"):
        find_files(f"{tmp_path}/*.jsonl")


def test_a_file_beside_its_compressed_copy_is_refused(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "b.jsonl.gz"):
        write_rows(tmp_path, rows_of([3]), name)
    with pytest.raises(DominoError, match="a.jsonl.gz and .*a.jsonl, so their rows would be read twice"):
        find_files(f"{tmp_path}/*")
    assert find_files(f"{tmp_path}/*.gz") == [f"{tmp_path}/a.jsonl.gz", f"{tmp_path}/b.jsonl.gz"]


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


def test_a_compressed_file_gives_the_batches_and_prompts_of_a_plain_one(tmp_path):
    rows = rows_of([3, 8, 4, 5, 7])
    plain, packed = (write_rows(tmp_path, rows, name) for name in FORMS)
    for expected, given in zip(take(batches_of(plain), 5), take(batches_of(packed), 5), strict=True):
        for key in expected:
            np.testing.assert_array_equal(expected[key], given[key])
    assert batches_of(packed).rows.where(2) == f"{packed}:3"
    assert list(read_jsonl(packed)) == list(read_jsonl(plain))


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


@pytest.mark.parametrize("read", [batches_of, lambda file: list(read_jsonl(file))], ids=["rows", "prompts"])
def test_a_damaged_archive_is_one_message_that_names_it(tmp_path, read):
    file = write_rows(tmp_path, rows_of([3 + place % 5 for place in range(400)]), "rows.jsonl.gz")
    data = file.read_bytes()
    middle = len(data) // 2
    for damaged in (data[:middle], data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="rows.jsonl.gz") as refused:
            read(file)
        assert refused.value.exit_code == 3 and len(str(refused.value).splitlines()) <= 2


OTHER_KINDS = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a web page": b"<!DOCTYPE html>\n<html>",
    "a Parquet file": b"PAR1\x15\x04",
    "a gzip archive": gzip.compress(b"{}"),
    "a JSON array": b'\xef\xbb\xbf[\n  {"prompt": "a"}\n]',
}


@pytest.mark.parametrize(("kind", "data"), OTHER_KINDS.items(), ids=OTHER_KINDS)
def test_a_file_of_another_kind_is_named_with_what_to_do(tmp_path, kind, data):
    (tmp_path / "rows.jsonl").write_bytes(data)
    for read in (lambda name: list(read_jsonl(name)), batches_of):
        with pytest.raises(DataError, match=kind) as refused:
            read(tmp_path / "rows.jsonl")
        assert "rows.jsonl" in str(refused.value) and len(str(refused.value).splitlines()) == 2
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(data))
    with pytest.raises(DataError, match=kind):
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
