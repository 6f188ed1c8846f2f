"""tiny_checks.py against hostile rows and answers: one sentence for a bad row, False for a bad answer, and fast."""

import json
import time

import pytest

from domino_jax import decode
from domino_jax.data.tiny_checks import check_answer, hinted, renamed
from domino_jax.runtime.errors import DataError

CODE = "def f(a):\n    return a"


def task(kind, check, code=CODE):
    content = f"Do it.\n```python\n{code}\n```"
    return {"kind": kind, "answer_check": check, "messages": [{"role": "user", "content": content}]}


HUGE = 50_000
BAD = {
    "no name": task("rename", {"old": "a b", "new": "b"}),
    "no text": task("rename", {"old": ["a"], "new": "b"}),
    "replacement of another kind": task("rename", {"old": "a", "new": 5}),
    "parameter that is no name": task("hint", {"parameter": "a(", "hint": "int"}),
    "missing value": task("hint", {"parameter": "a"}),
    "signs": task("stub", {}, "def f(a=" + "-" * HUGE + "1):\n    pass"),
    "brackets": task("stub", {}, "def f(a=" + "(" * HUGE + "1):\n    pass"),
    "calls": task("parameters", {}, "def f(a=" + "g(" * 150 + ")" * 150 + "):\n    pass\x00"),
    "attributes": task("parameters", {}, "def f(a=b" + ".b" * HUGE + "):\n    pass"),
    "sums": task("parameters", {}, "def f(a=1" + "+1" * HUGE + "):\n    pass"),
    "huge number": task(
        "arithmetic",
        {"name": "L", "things": "t", "pronoun": "s", "start": 10**4000, "steps": [["+", 10**4299, "w"]] * 11},
    ),
    "steps without end": task("arithmetic", {"name": "L", "things": "t", "pronoun": "s", "start": 1, "steps": 7}),
    "kind of another kind": {**task("stub", {}), "kind": [["stub"]]},
    "long kind": {**task("stub", {}), "kind": "x\n" * HUGE},
    "no content": {"kind": "stub", "answer_check": {}, "prompt": "x"},
}


@pytest.mark.parametrize("row", BAD.values(), ids=BAD.keys())
def test_a_checker_that_cannot_judge_is_one_sentence_with_file_and_line(tmp_path, row):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + json.dumps({"id": "odd", **row}) + "\n")
    with pytest.raises(DataError) as refused:
        decode.read_prompt_rows(str(path), 0, tokenizer="any")
    said = str(refused.value)
    assert said.startswith(f"{path}:3 (id odd) brings kind ") and "cannot judge" in said
    assert len(said.splitlines()) == 1 and len(said) < len(str(path)) + 400
    assert refused.value.exit_code == 3
    assert len(decode.read_prompt_rows(str(path), 0, tokenizer=None)) == 2  # nothing is judged without a tokenizer


def test_values_are_inserted_as_they_are():
    """In a replacement text of `re` these would be references to groups, and re.error."""
    assert renamed("a + ab", "a", r"\1\g<x>") == r"\1\g<x> + ab"
    assert hinted("def f(a, b):\n    pass", "b", r"\g<9>") == "def f(a, b: \\g<9>):\n    pass"
    assert hinted("def f(*a):\n    pass", None, r"\1") == "def f(*a) -> \\1:\n    pass"


ANSWERS = {
    "brackets": ("parameters", "[" * 1_000_000),
    "digits": ("parameters", "9" * 1_000_000),
    "fences": ("stub", " ```\n" * 200_000),
    "backticks": ("stub", "`" * 1_000_000),
    "numbers": ("arithmetic", "1" * 1_000_000),
    "sums": ("arithmetic", "1 + " * 250_000),
    "a surrogate": ("stub", "\ud800"),
}
CHECKS = {
    "arithmetic": {"name": "L", "things": "t", "pronoun": "s", "start": 1, "steps": [["+", 2, "gets 2"]]},
    "parameters": {},
    "stub": {},
}


@pytest.mark.parametrize(("kind", "answer"), ANSWERS.values(), ids=ANSWERS.keys())
def test_no_answer_takes_long_to_judge(kind, answer):
    """A megabyte each; what takes the square of that takes hours."""
    begin = time.process_time()
    assert check_answer(task(kind, CHECKS[kind]), answer) is False
    assert time.process_time() - begin < 5


def test_a_prompt_of_fences_that_never_close_is_refused_at_once():
    row = task("stub", {})
    row["messages"][0]["content"] = " ```\n" * 200_000
    begin = time.process_time()
    with pytest.raises(ValueError, match="no fenced code"):
        check_answer(row, "")
    assert time.process_time() - begin < 5
