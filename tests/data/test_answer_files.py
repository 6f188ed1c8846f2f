"""answer_files.py: one run at a time writes an output."""

import fcntl
import os
import pathlib

import pytest

from domino_jax.data.answer_files import AnswerFiles, ProcessGroup, local_output
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.journal import locked


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 1)])
def test_a_second_run_is_refused_before_it_cuts_the_row_that_the_first_one_is_writing(tmp_path, first, second):
    def files(count):
        return AnswerFiles(tmp_path / "rows.jsonl", ["a", "b"], {"seed": 1}, ProcessGroup(0, count))

    torn = b'{"id": "a"}\n{"id": "b", "token_'
    running = files(first)
    with running.opened():
        running.part.write_bytes(torn)
        with pytest.raises(DominoError, match="another process is writing"), files(second).opened():
            pass
        assert running.part.read_bytes() == torn
    with files(second).opened() as done:
        assert done == {"a"}


def test_a_lock_taken_on_a_file_that_a_merge_has_just_replaced_does_not_count(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.touch()
    (tmp_path / "merged").touch()
    monkeypatch.setattr(fcntl, "flock", lambda *_: os.replace(tmp_path / "merged", path))
    with pytest.raises(DominoError, match="another process is writing"), locked(path):
        pass


def test_an_object_store_is_refused():
    with pytest.raises(DominoError, match="no object store can do"):
        local_output("gs://bucket/rows.jsonl")
    assert local_output("~/rows.jsonl") == pathlib.Path.home() / "rows.jsonl"
