"""The ten benchmark tasks of the paper: which rows of a dataset, and the exact words around them.

The strings are taken from the public scripts of Domino and DFlash, character for character; they matter for τ. Where
they leave something open, a comment says so. All answers come from the chat template with thinking off and no system
prompt (config.decode.thinking).

Which rows: a dataset with more rows than the paper takes is shuffled with seed 0 and cut (`datasets`' own
`shuffle(seed=0)`, which is numpy's default_rng(0).permutation); otherwise all rows in order. A local file is treated as
the dataset, so a dump of the whole split in its order selects the rows that the hub would.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from domino_jax.data.prompts import quote_names, read_jsonl
from domino_jax.runtime.errors import DataError, DominoError, check_value, first_line, quote

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SHUFFLE_SEED = 0
OPTIONAL = ("input", "starter_code")  # fields that are null in some dumps
LIVECODEBENCH = "https://huggingface.co/datasets/livecodebench/code_generation_lite/resolve/main/"


@dataclasses.dataclass(frozen=True)
class Task:
    """One benchmark.

    count: rows that the paper takes.            hub: arguments of datasets.load_dataset.
    fields: of the row, which `turns` reads.     turns: row → the user's messages, in order.
    id_field: names a row; without such a field its place in the dataset does.
    """

    count: int
    hub: Mapping[str, Any]
    fields: tuple[str, ...]
    turns: Callable[[Mapping[str, Any]], list[str]]
    id_field: str | None = None


def _humaneval(row: Mapping[str, Any]) -> list[str]:
    request = "Write a solution to the following problem and make sure that it passes the tests:\n"
    return [f"{request}```python\n{row['prompt']}\n```"]


def _livecodebench(row: Mapping[str, Any]) -> list[str]:
    if row["starter_code"]:
        form = f"### Format: Use the following code structure:\n```python\n{row['starter_code']}\n```"
    else:
        form = "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```"
    return [
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate a"
        " correct Python program that matches the specification and passes all tests. You will NOT return anything"
        f" except for the program\n\n### Question:\n{row['question_content']}\n\n{form}\n\n"
        "### Answer: (use the provided format with backticks)"
    ]


def _maths(path: str, field: str, count: int, split: str, name: str | None = None) -> Task:
    return Task(count, _hub(path, split, name), (field,), lambda row: [f"{row[field]}{BOXED}"])


def _hub(path: str, split: str, name: str | None = None) -> dict[str, Any]:
    return {"path": path, "split": split, **({"name": name} if name else {})}


TASKS: dict[str, Task] = {
    "gsm8k": _maths("openai/gsm8k", "question", 128, "test", "main"),
    "math500": _maths("HuggingFaceH4/MATH-500", "problem", 128, "test"),
    "aime24": _maths("HuggingFaceH4/aime_2024", "problem", 30, "train"),
    "aime25": _maths("MathArena/aime_2025", "problem", 30, "train"),
    "humaneval": Task(164, _hub("openai/openai_humaneval", "test"), ("prompt",), _humaneval),
    "mbpp": Task(
        128, _hub("google-research-datasets/mbpp", "test", "sanitized"), ("prompt",), lambda row: [row["prompt"]]
    ),
    "livecodebench": Task(
        128,
        {
            "path": "json",
            "data_files": {"test": [f"{LIVECODEBENCH}test{part}.jsonl" for part in ("", 2, 3, 4, 5, 6)]},
            "split": "test",
        },
        ("question_content", "starter_code"),
        _livecodebench,
    ),
    "swe-bench": Task(
        128,
        _hub("princeton-nlp/SWE-bench_Lite", "test"),
        ("problem_statement",),
        lambda row: [f"Problem Statement:\n{row['problem_statement']}\nPlease fix the issue described above."],
        "instance_id",
    ),
    "mt-bench": Task(
        80, _hub("HuggingFaceH4/mt_bench_prompts", "train"), ("prompt",), lambda row: row["prompt"], "prompt_id"
    ),
    "alpaca": Task(
        128,
        _hub("tatsu-lab/alpaca", "train"),
        ("instruction", "input"),
        lambda row: [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]],
    ),
}


def parse_task(entry: str) -> tuple[str, int, str | None]:
    """(task, rows, file or None) of "gsm8k", "gsm8k=ROWS.jsonl", or with another number of rows "gsm8k:8" and
    "gsm8k:8=ROWS.jsonl"."""
    match = re.fullmatch(r"([^:=]*)(?::([1-9][0-9]*))?(?:=(.+))?", entry, re.DOTALL)
    name, count, path = match.groups() if match else (None, None, None)
    if name not in TASKS:
        raise DominoError(
            f"config.decode.tasks names {entry!r}, expected TASK, TASK:8 for 8 rows, TASK=ROWS.jsonl or"
            f" TASK:8=ROWS.jsonl;\nthe tasks are {', '.join(TASKS)}."
        )
    return name, int(count) if count else TASKS[name].count, path


def read_tasks(entries: Sequence[str]) -> list[dict[str, Any]]:
    """Prompt rows of all tasks, task by task: {"id", "task", "messages"} and "next_turns" where there are more turns.

    Raises DominoError: an unknown task or a source that cannot be reached.  DataError: rows that are not the task's.
    """
    choices = [parse_task(entry) for entry in entries]
    names = [name for name, _, _ in choices]
    double = next((name for name in names if names.count(name) > 1), None)
    if double:
        raise DominoError(f"config.decode.tasks names {double} twice; name each task once.")
    return [row for name, count, path in choices for row in task_rows(name, dataset_rows(name, path), count)]


def task_rows(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]], count: int) -> list[dict[str, Any]]:
    """The prompt rows of `count` dataset rows, each given with the place that an error message names."""
    task = TASKS[name]
    if not rows:
        raise DataError(f"the task {name} has no rows; give it the dataset's own rows.")
    prompts = {}
    for place in selection(len(rows), count):
        where, row = rows[place]
        first, *later = _turns(name, row, where)
        identity = task.id_field and row.get(task.id_field)
        prompt = {
            "id": f"{name}/{place if identity is None else quote(str(identity))[1:-1]}",
            "task": name,
            "messages": [{"role": "user", "content": first}],
            **({"next_turns": later} if later else {}),
        }
        if prompts.setdefault(prompt["id"], prompt) is not prompt:
            raise DataError(f"the task {name} has two rows with the {task.id_field} of {prompt['id']}; ids are unique.")
    return list(prompts.values())


def selection(rows: int, count: int) -> list[int]:
    """Places of the rows to take: all in order, or the first `count` of a shuffle when there are more."""
    if rows <= count:
        return list(range(rows))
    return [int(place) for place in np.random.default_rng(SHUFFLE_SEED).permutation(rows)[:count]]


def _turns(name: str, row: Mapping[str, Any], where: str) -> list[str]:
    task = TASKS[name]
    missing = [field for field in task.fields if field not in row]
    if missing:
        fields, there = ", ".join(task.fields), quote_names(row)
        raise DataError(f"{where}: {name} needs {fields}, but the row has no {missing[0]} (it has {there}).")
    for field in task.fields if name != "mt-bench" else ():  # a null would become the word None in the prompt
        text = isinstance(row[field], str) or (row[field] is None and field in OPTIONAL)
        check_value(text, f"{where}: {field}", row[field], "a text")
    turns = task.turns(row)
    texts = isinstance(turns, list) and turns and all(isinstance(turn, str) and turn for turn in turns)
    check_value(texts, f"{where}: the prompt of {name}", turns, "texts that are not empty")
    return turns


# ------------------------------------------------------------------------------------------------------ sources


def dataset_rows(name: str, path: str | None) -> list[tuple[str, Mapping[str, Any]]]:
    """All rows of a task's dataset with their places: from a file, or from the hub."""
    if path is not None:
        return [(f"{path}:{number}", row) for number, row in read_jsonl(path)]
    return [(f"{name}, row {place}", row) for place, row in enumerate(_from_hub(name))]


def _from_hub(name: str) -> Iterable[Mapping[str, Any]]:
    instead = f"name a file with its rows instead: --config.decode.tasks=\"('{name}=ROWS.jsonl',)\""
    try:
        import datasets
    except ImportError as error:
        raise DominoError(
            f"the task {name} is read from the hub through the package datasets, which is not installed:\n"
            f"pip install datasets; or {instead}."
        ) from error
    try:
        return datasets.load_dataset(**TASKS[name].hub)
    except Exception as error:  # datasets reads over the network and a cache, and its readers raise anything
        source = TASKS[name].hub["path"] if "data_files" not in TASKS[name].hub else LIVECODEBENCH
        raise DominoError(f"the task {name} cannot be read from {source} ({first_line(error)});\n{instead}.") from error
