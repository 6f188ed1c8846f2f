"""The shipped tiny target: its prompts, its tokenizer, and the checkers that judge its answers."""

import json
import re

import pytest

from assets.tiny_answers import prompt_code
from tests.helpers.paths import ASSETS

FOLDER = ASSETS / "tiny_qwen3"


def read_rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def train_rows():
    return read_rows("prompts_train.jsonl")


@pytest.fixture(scope="module")
def held_out_rows():
    return read_rows("prompts_heldout.jsonl")


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
