"""Tokenizers that put a space or a token before a text: rows and prompts are what other engines make of their text."""

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from domino_jax.data.chat import TextCodec, adds_a_space
from domino_jax.decoding.text_stream import TextStream
from tests.helpers.chat import encode_prompt, encode_training_row, turns

LETTERS = sorted(set("abcdefghijklmnopqrstuvwxyzHNSYRU .,?!:|<>/\n▁"))
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.fixture(scope="module", params=["prepended", "metaspace"])
def tokenizer(request):
    """Letters, and two line ends as one token, as Llama 2 is stored, old and new."""
    vocabulary = {piece: row for row, piece in enumerate([*LETTERS, "\n\n"])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("\n", "\n")]))
    if request.param == "prepended":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
        core.decoder = decoders.Metaspace("▁", prepend_scheme="first", split=False)
    core.add_special_tokens(["<s>", "</s>"])
    begin = [("<s>", core.token_to_id("<s>"))]
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_row_is_the_text_encoded_at_once_and_answers_begin_with_their_first_letter(tokenizer):
    messages = turns("Hi", "Yes", "Sure?", "No  no")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    row = encode_training_row(tokenizer, {"messages": messages}, False)
    assert adds_a_space(tokenizer)
    assert row.token_ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    starts = [place for place, mask in enumerate(row.loss_mask) if mask > row.loss_mask[place - 1]]
    assert tokenizer.convert_ids_to_tokens(row.token_ids[starts].tolist()) == ["Y", "N"]
    ends = [place for place, mask in enumerate(row.loss_mask) if mask < row.loss_mask[place - 1]]
    assert (row.token_ids[[place - 1 for place in ends]] == tokenizer.eos_token_id).all() and len(ends) == 2
    prompt = encode_prompt(tokenizer, {"messages": messages[:3]}, False)
    assert prompt == row.token_ids[: len(prompt)].tolist() and starts[1] == len(prompt)


def test_a_text_begins_as_the_tokenizer_begins_texts_and_messages_as_the_template_does(tokenizer):
    prompt = encode_prompt(tokenizer, {"prompt": "Hi you"}, False)
    assert prompt == tokenizer("Hi you").input_ids and prompt[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in encode_prompt(tokenizer, {"messages": turns("Hi you")}, False)


def test_a_streamed_text_with_a_special_token_inside_is_that_of_all_its_tokens(tokenizer):
    ids = [*tokenizer.encode("one"), *tokenizer.encode("two three")]
    stream = TextStream(tokenizer)
    pieces = [stream.add([token], last=place + 1 == len(ids)) for place, token in enumerate(ids)]
    assert "".join(pieces) == TextCodec(tokenizer, False).decode(ids)
