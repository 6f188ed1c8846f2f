"""files.py: a file is complete or not there, and what several processes need is made once."""

import os

import pytest

from domino_jax.runtime import files


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
