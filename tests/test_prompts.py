"""prompts.py: JSONL and prompt rows; what is wrong is told with file, line and id."""

import pytest

from domino_jax.data.prompts import check_prompt, read_jsonl, read_prompts
from domino_jax.errors import DataError, DominoError


def write(tmp_path, *lines):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return file


def test_rows_come_with_their_line_numbers_and_blank_lines_are_passed_over(tmp_path):
    file = write(tmp_path, '{"a": 1}', "", "  ", '{"b": "é"}')
    assert list(read_jsonl(file)) == [(1, {"a": 1}), (4, {"b": "é"})]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": 1', "rows.jsonl:2: the line is no JSON"),
        ("[1]", "rows.jsonl:2: the line holds a list"),
        (b"\xff{", "rows.jsonl:2"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, said):
    with pytest.raises(DataError, match=said) as refused:
        list(read_jsonl(write(tmp_path, '{"a": 1}', line)))
    assert refused.value.exit_code == 3


def test_a_missing_file_is_a_usage_error(tmp_path):
    with pytest.raises(DominoError, match="there is no such file") as refused:
        list(read_jsonl(tmp_path / "none.jsonl"))
    assert refused.value.exit_code == 2


def test_prompts_keep_their_other_keys_and_get_an_id(tmp_path):
    file = write(tmp_path, '{"prompt": "a", "kind": "x"}', '{"id": 7, "token_ids": [1, 2]}', '{"prompt": "c"}')
    assert read_prompts(file) == [
        {"prompt": "a", "kind": "x", "id": "0"},
        {"token_ids": [1, 2], "id": "7"},
        {"prompt": "c", "id": "2"},
    ]
    assert [row["id"] for row in read_prompts(file, limit=2)] == ["0", "7"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ['{"id": "q1", "text": "a"}'],
            r"rows.jsonl:1 \(id q1\): the row has id, text; a prompt row has exactly one of",
        ),
        (['{"prompt": "a", "token_ids": [1]}'], "the row has prompt, token_ids"),
        (['{"prompt": ""}'], "expected a text that is not empty"),
        (['{"prompt": 3}'], "prompt is 3"),
        (['{"messages": []}'], "at least one message"),
        (['{"messages": "hello"}'], "must be a list"),
        (['{"messages": ["hello"]}'], "message 0 is"),
        (['{"messages": [{"role": "user"}]}'], "message 0 is"),
        (['{"messages": [{"role": "user", "content": [1]}]}'], "message 0 is"),
        (['{"token_ids": []}'], "at least one id"),
        (['{"token_ids": [1, -1]}'], "token_ids is"),
        (['{"token_ids": [1, true]}'], "token_ids is"),
        (
            ['{"id": "a", "prompt": "x"}', '{"id": "a", "prompt": "y"}'],
            "rows.jsonl:2: the id a is already that of line 1",
        ),
        ([""], "holds no prompt rows"),
    ],
)
def test_a_row_that_is_no_prompt_is_refused(tmp_path, lines, said):
    with pytest.raises(DataError, match=said):
        read_prompts(write(tmp_path, *lines))


def test_a_tool_call_may_have_no_text():
    check_prompt({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "row")
