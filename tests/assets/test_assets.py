"""The shipped tiny target: its prompts, its tokenizer, and the checkers that judge its answers."""

import json
import re

import pytest

from assets.tiny_answers import prompt_code
from domino_jax.data.chat import TextCodec
from domino_jax.decoding.answers import AnswerPasses, TargetAnswer
from domino_jax.decoding.requests import Request
from domino_jax.method.pair import Pair
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.weights import hf
from domino_jax.weights.loading import load_target
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


@pytest.fixture(scope="module")
def answers(train_rows):
    """The shipped answers as (prompt, answer), after a look at their prompts and masks."""
    tokenizer, pairs = hf.load_tokenizer(FOLDER), []
    for prompt, row in zip(train_rows, read_rows("answers_train.jsonl"), strict=False):
        tokens = TextCodec(tokenizer, False).encode(prompt, "prompt")
        rest = row["token_ids"][len(tokens) :]
        assert row["id"] == prompt["id"] and row["token_ids"] == tokens + rest
        assert row["loss_mask"] == [0] * len(tokens) + [1] * len(rest)
        pairs.append((tokens, rest))
    return pairs


def test_shipped_answers_end_by_themselves_or_at_the_limit(answers):
    stop_ids = set(hf.stop_ids(FOLDER))
    assert len(answers) == 200 and all(rest[-1] in stop_ids or len(rest) == 128 for _, rest in answers)


@pytest.mark.slow(minutes=1)
def test_shipped_answers_are_the_targets_choice(answers):
    loaded = load_target(str(FOLDER), "float32")
    request = Request(0, 0, None, SamplingParams())
    passes = AnswerPasses([TargetAnswer("", *pair, request) for pair in answers], DraftSettings(), 8)
    chosen = passes.chosen(Pair(loaded.model, loaded.params))
    assert sum(one.all() for one in chosen) >= 199  # one may differ at a near tie of another compiler


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
