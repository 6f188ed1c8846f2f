"""tasks.py: the public benchmarks' prompts to the letter, their rows by the public selection, and every source that
can be missing."""

import json
import sys
import types

import pytest

from domino_jax.data.tasks import read_tasks, selection
from domino_jax.runtime.errors import DataError, DominoError

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def write(tmp_path, name, *rows):
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{name}={path}"


def prompts_of(tmp_path, name, *rows):
    return read_tasks([write(tmp_path, name, *rows)])


LCB = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\nQ?\n\n"
)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k", {"question": "1 {x}?", "answer": "#### 2"}, "1 {x}?" + BOXED),
        ("math500", {"problem": "P", "solution": "s"}, "P" + BOXED),
        (
            "humaneval",
            {"task_id": "HumanEval/0", "prompt": "def f():\n"},
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```",
        ),
        ("mbpp", {"prompt": "Write a function."}, "Write a function."),
        ("alpaca", {"instruction": "Do.", "input": ""}, "Do."),
        ("alpaca", {"instruction": "Do.", "input": None}, "Do."),
        ("alpaca", {"instruction": "Do.", "input": "This"}, "Do.\n\nInput:\nThis"),
        (
            "swe-bench",
            {"instance_id": "a__b-1", "problem_statement": "It fails."},
            "Problem Statement:\nIt fails.\nPlease fix the issue described above.",
        ),
        (
            "livecodebench",
            {"question_content": "Q?", "starter_code": "class S:\n"},
            LCB + "### Format: Use the following code structure:\n```python\nclass S:\n\n```\n\n"
            "### Answer: (use the provided format with backticks)",
        ),
        (
            "livecodebench",
            {"question_content": "Q?", "starter_code": ""},
            LCB + "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
            "### Answer: (use the provided format with backticks)",
        ),
    ],
)
def test_a_row_becomes_the_public_benchmarks_message(tmp_path, name, row, message):
    [prompt] = prompts_of(tmp_path, name, row)
    assert prompt["messages"] == [{"role": "user", "content": message}]
    assert prompt["task"] == name and "next_turns" not in prompt


def test_mt_bench_asks_its_second_turn_later(tmp_path):
    [prompt] = prompts_of(tmp_path, "mt-bench", {"prompt_id": 81, "prompt": ["Write.", "Now shorter."]})
    assert prompt["id"] == "mt-bench/81"
    assert prompt["messages"] == [{"role": "user", "content": "Write."}]
    assert prompt["next_turns"] == ["Now shorter."]


def test_more_rows_than_the_paper_takes_are_shuffled_with_seed_0_and_cut_others_stay_in_order():
    assert selection(10, 4) == [4, 6, 2, 7]
    assert selection(4, 4) == [0, 1, 2, 3]
    assert selection(3, 4) == [0, 1, 2]


def test_a_row_is_named_after_its_place_in_the_dataset(tmp_path):
    entry = write(tmp_path, "gsm8k", *({"question": str(place)} for place in range(10)))
    rows = read_tasks([entry.replace("gsm8k=", "gsm8k:4=")])
    assert [row["id"] for row in rows] == ["gsm8k/4", "gsm8k/6", "gsm8k/2", "gsm8k/7"]
    assert rows[0]["messages"][0]["content"] == "4" + BOXED


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        *(([entry], f"names '{entry}', expected TASK") for entry in ("gsm9k", "gsm8k:0", "gsm8k:many", "gsm8k=")),
        (["mbpp", "mbpp:3"], "names mbpp twice"),
        (["gsm8k=nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
    ],
)
def test_a_mistaken_entry_is_a_usage_error(entries, message):
    with pytest.raises(DominoError, match=message) as refused:
        read_tasks(entries)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("gsm8k", [{"question": "a"}, {"problem": "b"}], r"gsm8k.jsonl:2: .* has no question \(it has problem\)"),
        ("gsm8k", [{"question": None}], "jsonl:1: question is None, expected a text"),
        ("mt-bench", [{"prompt": "one turn"}], "is 'one turn', expected texts"),
        ("mt-bench", [{"prompt": ["a", ""]}], "expected texts that are not empty"),
        (
            "mt-bench",
            [{"prompt_id": 1, "prompt": ["a"]}, {"prompt_id": 1, "prompt": ["b"]}],
            "two rows with the prompt_id",
        ),
        ("aime24", [], "has no rows"),
    ],
)
def test_rows_that_are_not_the_tasks_are_refused_by_file_and_line(tmp_path, name, rows, message):
    with pytest.raises(DataError, match=message) as refused:
        prompts_of(tmp_path, name, *rows)
    assert refused.value.exit_code == 3


# ------------------------------------------------------------------------------------------- hub and packages


def test_the_hub_is_asked_for_the_public_split_and_a_sentence_says_what_to_do_without_it(monkeypatch):
    asked = []

    def load(**arguments):
        asked.append(arguments)
        if len(asked) > 1:
            raise ConnectionError("no route\nand more")
        return [{"question": "Q"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    assert [prompt["id"] for prompt in read_tasks(["gsm8k"])] == ["gsm8k/0"]
    assert asked == [{"path": "openai/gsm8k", "name": "main", "split": "test"}]
    with pytest.raises(DominoError, match=r"from openai/gsm8k \(ConnectionError: no route\)"):
        read_tasks(["gsm8k"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DominoError, match="pip install datasets; or name a file") as refused:
        read_tasks(["gsm8k"])
    assert len(str(refused.value).splitlines()) <= 5 and refused.value.exit_code == 2
