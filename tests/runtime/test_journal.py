"""Files that grow line by line: a line counts once its end is written."""

import json

from domino_jax.runtime.journal import Journal, whole_lines


def ids(path):
    return [json.loads(line.text)["id"] for line in whole_lines(path)]


def test_rows_are_lines_and_a_second_journal_appends_after_a_torn_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Journal(path) as journal:
        journal.append({"id": "a"}, {"id": "é\u2028"})
        assert ids(path) == ["a", "é\u2028"]
    path.write_bytes(path.read_bytes() + b"\n" + b'{"id": "torn')
    assert [(line.number, line.start) for line in whole_lines(path)] == [(1, 0), (2, 12)]
    with Journal(path) as journal:
        journal.append({"id": "b"})
        assert ids(path) == ["a", "é\u2028", "b"]
        journal.clear()
        assert ids(path) == []
