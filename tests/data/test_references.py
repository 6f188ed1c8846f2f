"""references.py: answers agree with references line by line, as JSON, or in their equations; hostile texts end fast."""

import json

import pytest

from domino_jax.data.prompts import read_prompts
from domino_jax.data.references import Reference, reference_of
from domino_jax.runtime.errors import DataError

SUM = Reference("equations", "2 + 3 = 5, then 5 - 1 = 4. She has 4.")
OBJECT = Reference("json", '{"a": [1, 2]}')
CODE = Reference("lines", "```python\ndef f(a):\n    return a\n```")


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (SUM, "Now 2 + 3 = 5. Later 5 - 1 = 4 are left: 4", "2 + 3 = 5, then 5 - 1 = 4. She has 5."),
        (OBJECT, ' {"a":\n[1, 2]} ', '{"a": [2, 1]}'),
        (CODE, "Here:\n```python\ndef f(a):  \n    return a\n```\nDone.", "```python\ndef f(a):\nreturn a\n```"),
        (Reference("lines", "yes"), "yes\n", "no"),
    ],
)
def test_wording_and_layout_are_free_where_the_comparison_says_so(reference, right, wrong):
    assert reference.accepts(right) and not reference.accepts(wrong) and not reference.accepts("")


def test_a_row_has_a_reference_or_none():
    assert reference_of({"reference": {"compare": "lines", "answer": "x"}}, "row") == Reference("lines", "x")
    for row in ({}, {"reference": "a text"}, {"reference": ["a", "b"]}):  # columns of other datasets
        assert reference_of(row, "row") is None


BAD = [{}, {"compare": "lines"}, {"compare": "words", "answer": "x"}, {"compare": ["lines"], "answer": "x"}]
BAD += [{"compare": "lines", "answer": 5}, {"compare": "x\n" * 50_000, "answer": "x"}]


@pytest.mark.parametrize("value", BAD)
def test_a_reference_that_cannot_be_compared_is_one_sentence_with_file_and_line(tmp_path, value):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{{"id": "odd", "prompt": "x", "reference": {json.dumps(value)}}}\n')
    with pytest.raises(DataError) as refused:
        read_prompts(path)
    message = str(refused.value)
    assert message.startswith(f"{path}:3 (id odd): reference is ") and "one of lines, json, equations" in message
    assert len(message.splitlines()) <= 5 and len(message) < 3 * len(str(path)) + 500
