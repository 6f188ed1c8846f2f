"""The shipped tiny target: its folder, its tokenizer, its prompts, and the checkers that judge its answers."""

import json
import re

import pytest

from assets.tiny_answers import KINDS, expected_answer, prompt_code, reference
from domino_jax.data.references import Reference
from tests.helpers.paths import ASSETS

FOLDER = ASSETS / "tiny_qwen3"
CODE = "def scale(self, left, factor=2):\n    left = left * factor\n    return left"


def read_rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def train_rows():
    return read_rows("prompts_train.jsonl")


@pytest.fixture(scope="module")
def held_out_rows():
    return read_rows("prompts_heldout.jsonl")


def check_answer(row: dict, text: str) -> bool:
    return Reference(**reference(row)).accepts(text)


def code_row(kind: str, **check) -> dict:
    content = f"Do it.\n```python\n{CODE}\n```"
    return {"id": "x", "kind": kind, "messages": [{"role": "user", "content": content}], "answer_check": check}


def arithmetic_row() -> dict:
    steps = [["+", 5, "buys 5 more"], ["-", 3, "loses 3"]]
    check = {"name": "Anna", "things": "coins", "pronoun": "She", "start": 10, "steps": steps}
    return {"id": "x", "kind": "arithmetic", "messages": [{"role": "user", "content": "?"}], "answer_check": check}


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


# a row, the answer written out by hand, and where a part of it is wrong: (right part, wrong part)
HEADER, BODY, END = "def scale(self, left, factor=2):\n", "    left = left * factor\n", "    return left"
STARTS, ENDS = (
    "Anna starts with 10 coins.\nShe buys 5 more: 10 + 5 = 15.\n",
    "She loses 3: 15 - 3 = 12.\nAnna has 12 coins.",
)
CASES = [
    (
        code_row("parameters"),
        '{"function": "scale", "parameters": ["self", "left", "factor"], "defaults": {"factor": "2"}}',
        ('"self", "left"', '"left", "self"'),
    ),
    (
        code_row("rename", old="left", new="item"),
        fenced((HEADER + BODY + END).replace("left", "item")),
        ("return item", "return left"),
    ),
    (code_row("number"), fenced(f"1: {HEADER}2: {BODY}3: {END}"), ("3:", "4:")),
    (
        code_row("hint", parameter="left", hint="int"),
        fenced((HEADER + BODY + END).replace("left,", "left: int,")),
        (": int", ": str"),
    ),
    (
        code_row("hint", parameter=None, hint="int"),
        fenced((HEADER + BODY + END).replace("2):", "2) -> int:")),
        (" -> int", ""),
    ),
    (
        code_row("comment", comment="checked by hand"),
        fenced("# checked by hand\n" + CODE),
        (f"# checked by hand\n{CODE}", f"{CODE}\n# checked by hand"),
    ),
    (
        code_row("stub"),
        fenced(HEADER + '    raise NotImplementedError("scale")'),
        (", factor=2", ""),
    ),
    (
        code_row("method", class_name="Shape"),
        fenced(f"class Shape:\n    {HEADER}    {BODY}    {END}"),
        ("        return", "    return"),
    ),
    (arithmetic_row(), STARTS + ENDS, (ENDS, ENDS.replace("12", "13"))),
]


def test_cases_cover_every_kind():
    assert {row["kind"] for row, _, _ in CASES} == set(KINDS)


@pytest.mark.parametrize("row, right, slip", CASES, ids=lambda value: value["kind"] if isinstance(value, dict) else "")
def test_checker_accepts_right_and_refuses_wrong(row, right, slip):
    assert expected_answer(row) == right and right.replace(*slip) != right
    assert check_answer(row, right) and check_answer(row, right + "\n")
    for wrong in (right.replace(*slip), right[: len(right) // 2], ""):
        assert not check_answer(row, wrong)


def test_prompts_parse_and_accept_their_own_answers(train_rows, held_out_rows):
    assert len(held_out_rows) >= 256 and len(train_rows) >= 2_500
    for rows in (train_rows, held_out_rows):
        assert len({row["id"] for row in rows}) == len(rows)
        assert {row["kind"] for row in rows} == set(KINDS)
        assert all(check_answer(row, expected_answer(row)) for row in rows)
        assert len({expected_answer(row) for row in rows}) >= 0.9 * len(rows)
    assert all(row["reference"] == reference(row) for row in held_out_rows)


def test_held_out_functions_are_not_in_the_training_prompts(train_rows, held_out_rows):
    train, held_out = (
        {prompt_code(row) for row in rows if row["kind"] != "arithmetic"} for rows in (train_rows, held_out_rows)
    )
    assert not train & held_out
    train, held_out = (
        {row["messages"][0]["content"] for row in rows if row["kind"] == "arithmetic"}
        for rows in (train_rows, held_out_rows)
    )
    assert not train & held_out


def test_transformers_loads_tokenizer_and_template():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    user = [{"role": "user", "content": "Hi."}]

    def text(messages, **options):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    prompt = "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    assert text(user, add_generation_prompt=True) == prompt
    answered = text(user, add_generation_prompt=True, enable_thinking=False)
    assert answered == prompt + "<think>\n\n</think>\n\n"
    # A finished conversation starts with exactly the prompt that decoding uses.
    assert text([*user, {"role": "assistant", "content": "Ho."}]) == answered + "Ho.<|im_end|>\n"
    assert tokenizer.pad_token == "<|endoftext|>" and tokenizer.eos_token == "<|im_end|>"
    assert re.fullmatch(r"<\|mask\|>", tokenizer.convert_ids_to_tokens(len(tokenizer) - 1))
