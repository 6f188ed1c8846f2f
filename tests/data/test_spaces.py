"""Tokenizers that put a space or a token before a text: rows and prompts are what other engines make of their text."""

import logging

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from domino_jax.data.chat import TextCodec, adds_a_space, encode_prompt, encode_training_row
from domino_jax.decoding.text_stream import TextStream
from domino_jax.runtime.errors import DataError
from tests.helpers.chat import marked, turns

LETTERS = sorted(set("abcdefghijklmnopqrstuvwxyzHNSYRU .,?!:|<>/\n▁Ġ"))
SPACE = normalizers.Replace(" ", "▁")
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def make_tokenizer(kind, template=TEMPLATE):
    """Letters, and two line ends as one token. By kind as Llama 2 is stored, old and new, or as GPT-2 is."""
    vocabulary = {piece: row for row, piece in enumerate([*LETTERS, "Ċ", "\n\n", "ĊĊ"])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("\n", "\n"), ("Ċ", "Ċ")]))
    if kind == "prepended":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), SPACE])
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    if kind == "metaspace":
        core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        core.decoder = decoders.Metaspace("▁", prepend_scheme="first", split=False)
    if kind.startswith("bytes"):
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "bytes spaced", use_regex=False)
        core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>"])
    begin = [("<s>", core.token_to_id("<s>"))]
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


SPACED = ("prepended", "metaspace", "bytes spaced")


@pytest.mark.parametrize("kind", SPACED)
def test_a_row_is_the_text_encoded_at_once_and_answers_begin_with_their_first_letter(kind):
    tokenizer, messages = make_tokenizer(kind), turns("Hi", "Yes", "Sure?", "No  no")
    assert adds_a_space(tokenizer) and not adds_a_space(make_tokenizer("bytes"))
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    row = encode_training_row(tokenizer, {"messages": messages}, False)
    assert row.token_ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    starts = [place for place, mask in enumerate(row.loss_mask) if mask > row.loss_mask[place - 1]]
    assert tokenizer.convert_ids_to_tokens(row.token_ids[starts].tolist()) == ["Y", "N"]
    ends = [place for place, mask in enumerate(row.loss_mask) if mask < row.loss_mask[place - 1]]
    assert (row.token_ids[[place - 1 for place in ends]] == tokenizer.eos_token_id).all() and len(ends) == 2
    prompt = encode_prompt(tokenizer, {"messages": messages[:3]}, False)
    assert prompt == row.token_ids[: len(prompt)].tolist() and starts[1] == len(prompt)


@pytest.mark.parametrize("kind", ["prepended", "metaspace"])
def test_a_token_across_the_start_of_an_answer_is_context(kind):
    tokenizer = make_tokenizer(kind)
    row = encode_training_row(tokenizer, {"messages": turns("Hi", "\nYes")}, False)
    assert "Yes</s>]" in marked(tokenizer, row) and "\n[" not in marked(tokenizer, row).replace("\n\n[", "")


@pytest.mark.parametrize("kind", [*SPACED, "bytes"])
def test_a_text_as_a_prompt_begins_as_the_tokenizer_begins_texts_and_messages_as_the_template_does(kind):
    tokenizer = make_tokenizer(kind)
    prompt = encode_prompt(tokenizer, {"prompt": "Hi you"}, False)
    assert prompt == tokenizer("Hi you").input_ids and prompt[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in encode_prompt(tokenizer, {"messages": turns("Hi you")}, False)


@pytest.mark.parametrize("kind", SPACED)
def test_a_streamed_text_with_a_special_token_inside_is_that_of_all_its_tokens(kind):
    tokenizer = make_tokenizer(kind)
    ids = [*tokenizer.encode("one"), *tokenizer.encode("two three")]
    for first in (ids, ids[1:]):
        stream = TextStream(tokenizer)
        pieces = [stream.add([token], last=place + 1 == len(first)) for place, token in enumerate(first)]
        assert "".join(pieces) == TextCodec(tokenizer, False).decode(first)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}


def test_what_a_template_never_reads_is_named_once(caplog):
    tokenizer = make_tokenizer("bytes", TEMPLATE + "{# tools #}{{ '' if mood else '' }}use tools, enable_thinking")
    row = {"messages": turns("Hi"), "tools": [{"name": "add"}], "chat_template_kwargs": {"mood": 1, "tone": 2}}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            encode_prompt(tokenizer, row, False)
        named = [record.getMessage() for record in caplog.records]
        assert len(named) == 2 and "'tone'" in named[0] and "'tools'" in named[1]
        for _ in range(2):
            encode_prompt(tokenizer, {"messages": turns("Hi")}, True)
        assert [record.getMessage().count("decode.thinking") for record in caplog.records[2:]] == [1]


def test_what_a_template_reads_is_not_named(caplog):
    reads = "{% if tools %}{{ tools[0]['name'] }}{% endif %}{% if enable_thinking is defined %}{% endif %}"
    tokenizer = make_tokenizer("bytes", reads + TEMPLATE)
    encode_prompt(tokenizer, {"messages": turns("Hi"), "tools": [{"name": "add"}]}, True)
    assert not caplog.records


def test_a_call_that_the_template_does_not_write_is_refused():
    row = {"messages": [*turns("Hi"), CALL]}
    with pytest.raises(DataError, match="tool_calls, which the chat template does not write"):
        encode_training_row(make_tokenizer("bytes"), row, False)
    writes = TEMPLATE.replace("+ '</s>", "+ (m.tool_calls or []) | string + '</s>")
    assert encode_training_row(make_tokenizer("bytes", writes), row, False).loss_mask.any()
