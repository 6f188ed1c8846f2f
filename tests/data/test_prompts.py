"""prompts.py: JSONL and prompt rows; what is wrong is refused with file, line and id."""

import json

import pytest

from domino_jax.data.prompts import read_jsonl, read_prompts
from domino_jax.runtime.errors import DataError, DominoError


def write(tmp_path, *lines):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return file


def test_rows_come_with_their_line_numbers_and_blank_lines_are_passed_over(tmp_path):
    file = write(tmp_path, '{"a": 1}', "", "  ", '{"b": "é"}')
    assert list(read_jsonl(file)) == [(1, {"a": 1}), (4, {"b": "é"})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"a": 1', "rows.jsonl:2: the line is not a JSON"),
        ("[1]", "rows.jsonl:2: the line is .1., expected a JSON object"),
        (b"\xff{", "rows.jsonl:2"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, message):
    with pytest.raises(DataError, match=message) as refused:
        list(read_jsonl(write(tmp_path, '{"a": 1}', line)))
    assert refused.value.exit_code == 3


def test_prompts_keep_their_other_keys_and_get_an_id(tmp_path):
    file = write(tmp_path, '{"prompt": "a", "kind": "x"}', '{"id": 7, "token_ids": [1, 2]}', '{"prompt": "c"}')
    assert read_prompts(file) == [
        {"prompt": "a", "kind": "x", "id": "0"},
        {"token_ids": [1, 2], "id": "7"},
        {"prompt": "c", "id": "2"},
    ]
    assert [row["id"] for row in read_prompts(file, limit=2)] == ["0", "7"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ['{"id": "q1", "text": "a"}'],
            r"rows.jsonl:1 \(id q1\): the row has id, text; a prompt row has exactly one of",
        ),
        (['{"prompt": "a", "token_ids": [1]}'], "the row has prompt, token_ids"),
        (['{"prompt": ""}'], "expected a text that is not empty"),
        (['{"messages": [{"role": "user", "content": [1]}]}'], "message 0 of messages"),
        (['{"prompt": "a", "tools": [{}]}'], "tools beside prompt"),
        (['{"token_ids": []}'], "at least one id"),
        (['{"token_ids": [1, true]}'], "token_ids is"),
        (
            ['{"id": "a", "prompt": "x"}', '{"id": "a", "prompt": "y"}'],
            r"rows.jsonl:2: the id a is also the id of .*rows.jsonl:1; make",
        ),
        ([""], "holds no prompt rows"),
        (
            ['{"prompt": "a"}', '{"prompt": "b", "source": "\\ud800"}'],
            r"rows.jsonl:2 \(id 1\) holds half of a surrogate",
        ),
        (['{"prompt": "a", "id": "a\\nb"}'], r"rows.jsonl:1: the id is 'a\\nb'; an id has"),
        (['{"%s": 1}' % ("k" * 100_000)], r"the row has kkk.*; a prompt row"),
    ],
)
def test_a_row_that_is_no_prompt_is_refused(tmp_path, lines, message):
    with pytest.raises(DataError, match=message) as refused:
        read_prompts(write(tmp_path, *lines))
    assert len(str(refused.value)) < 700 and len(str(refused.value).splitlines()) <= 5


def test_prompts_of_every_form_become_messages(tmp_path):
    shared = (
        '{"conversations": [{"from": "human", "value": "a"}], "system": "s", "tools": "", "seed": 3, "top_k": null}'
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert read_prompts(write(tmp_path, shared)) == [{"id": "0", "messages": messages, "seed": 3}]


def test_a_first_message_that_stands_in_a_column_too_is_read_once(tmp_path):
    """As in UltraChat's rows."""
    file = write(tmp_path, '{"prompt": "a", "prompt_id": "7", "messages": [{"role": "user", "content": "a"}]}')
    assert read_prompts(file) == [{"id": "0", "prompt_id": "7", "messages": [{"role": "user", "content": "a"}]}]


def test_answers_that_end_a_conversation_are_no_part_of_the_prompt(tmp_path):
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    [row] = read_prompts(write(tmp_path, json.dumps({"messages": turns})))
    assert row["messages"] == turns[:3]
    with pytest.raises(DataError, match="all messages are the assistant's"):
        read_prompts(write(tmp_path, json.dumps({"messages": turns[1:2]})))


def test_a_glob_names_files_of_prompts_whose_ids_go_on(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    assert [(row["id"], row["prompt"]) for row in read_prompts(tmp_path / "*.jsonl")] == [("0", "a"), ("1", "b")]
    with pytest.raises(DominoError, match="is a folder; name its files"):
        read_prompts(tmp_path)


def test_bad_prompts_are_listed_together_or_left_out(tmp_path, capsys):
    good, bad = '{"prompt": "a"}', [f'{{"prompt": {number}}}' for number in range(13)]
    file = write(tmp_path, good, *bad, '{"prompt": "b"', "", '{"id": "z", "prompt": "c"}', '{"prompt": "d"}')
    with pytest.raises(DataError) as refused:
        read_prompts(file)
    message = str(refused.value)
    for part in ("14 of 17 rows", "rows.jsonl:2", "rows.jsonl:3", "rows.jsonl:4"):
        assert part in message
    assert "data.skip_bad_rows" in message and len(message.splitlines()) <= 5
    assert [row["id"] for row in read_prompts(file, skip_bad=True)] == ["0", "z", "16"]
    assert "14 of 17 rows" in capsys.readouterr().out
    with pytest.raises(DataError, match="1 of 1 rows"):
        read_prompts(write(tmp_path, "{}"), skip_bad=True)
