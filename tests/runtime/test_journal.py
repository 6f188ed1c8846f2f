"""Files that grow line by line: a line counts once its end is written."""

from domino_jax.runtime.journal import Journal, whole_lines


def test_rows_are_lines_and_a_second_journal_appends_after_a_torn_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    with Journal(path) as journal:
        assert journal.append({"id": "a"}, {"id": "é\u2028"}) == path.stat().st_size
    whole = path.read_bytes()
    path.write_bytes(whole + b"\n" + b'{"id": "torn')
    assert [line.parse()["id"] for line in whole_lines(path)] == ["a", "é\u2028"]
    assert [(line.number, line.start, line.end) for line in whole_lines(path)] == [(1, 0, 12), (2, 12, len(whole))]
    with Journal(path) as journal:
        size = journal.append({"id": "b"})
        assert [line.parse()["id"] for line in whole_lines(path)] == ["a", "é\u2028", "b"]
        journal.truncate(len(whole))
        assert (size, path.read_bytes()) == (len(whole) + 12, whole)
