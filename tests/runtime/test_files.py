"""files.py: a file is complete or not there, and what several processes need is made once."""

import os
import threading

import pytest

from domino_jax.data.sources import open_files
from domino_jax.runtime import files, remote
from domino_jax.weights import hf


def full_disk(descriptor):
    raise OSError(28, "No space left on device")


def test_a_file_whose_writing_fails_stays_as_it_was_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    files.write_whole(path, "first")
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            files.write_whole(path, "second")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.html", "first")]


def test_a_folder_that_is_not_filled_to_the_end_is_removed(tmp_path):
    def fail(fresh):
        fresh.mkdir()
        (fresh / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        files.make_once(tmp_path / "folder", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".folder.lock"]


def test_a_model_and_data_in_a_bucket_are_copied_once_whoever_asks_meanwhile(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    store, copied = remote.filesystem(bucket), []
    store.pipe_file(f"{bucket}/target/config.json", b"{}")
    store.pipe_file(f"{bucket}/rows.jsonl", b"{}\n")
    both, get = threading.Barrier(2), store.get_file

    def get_slowly(name, target):
        copied.append(name)
        threading.Event().wait(0.3)
        get(name, target)

    monkeypatch.setattr(store, "get_file", get_slowly)
    found = []

    def ask():
        both.wait()
        found.append((hf.resolve_folder(f"{bucket}/target"), open_files(f"{bucket}/rows.jsonl", tmp_path)))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] and len(copied) == 2  # a file of each
