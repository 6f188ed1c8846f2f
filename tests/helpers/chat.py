"""A chat template like Qwen3's, and rows as text with the supervised runs in brackets."""

import numpy as np
import tokenizers
import transformers

from domino_jax.data.chat import TextCodec, training_rows

TEMPLATE = r"""
{%- macro turn(role) %}{{ '<|im_start|>' + role + '\n' }}{% endmacro %}
{%- set asked = namespace(last=messages|length - 1) %}
{%- for m in messages %}
  {%- set text = m.content or '' %}
  {%- set tool_says = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
  {%- if m.role == 'user' and not tool_says %}{%- set asked.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
  {%- set answer, thought = (m.content or ''), (m.reasoning_content or '') %}
  {%- if m.role == 'tool' %}
    {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + answer + '\n</tool_response>' }}
    {%- if loop.nextitem is undefined or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- elif m.role == 'assistant' %}
    {%- if not thought and '</think>' in answer %}
      {%- set thought = answer.split('</think>')[0].split('<think>')[-1] %}
      {%- set answer = answer.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- turn('assistant') }}
    {%- if loop.index0 > asked.last and (loop.last or thought) %}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
      {%- set answer = answer.lstrip('\n') %}
    {%- endif %}
    {{- answer }}
    {%- for call in m.tool_calls or [] %}
      {%- set f = call.function or call %}
      {%- set given = f.arguments if f.arguments is string else f.arguments|tojson %}
      {{- ('\n' if answer or not loop.first else '') }}
      {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' + given + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role in ('system', 'user') %}
    {{- turn(m.role) + answer + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- turn('assistant') }}
  {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def make_tokenizer(template=TEMPLATE):
    """Bytes, the special tokens, and one merge: two line ends are one token, so that a boundary can be straddled."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: row for row, piece in enumerate([*alphabet, "ĊĊ"])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def marked(tokenizer, row):
    """The row's text with the supervised runs in brackets."""
    edges = np.flatnonzero(np.diff(row.loss_mask)) + 1
    texts = [tokenizer.decode(run) for run in np.split(row.token_ids, edges)]
    return "".join(f"[{text}]" if place % 2 else text for place, text in enumerate(texts))


def turns(*texts):
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def encode_prompt(tokenizer, row, thinking, today=False):
    return TextCodec(tokenizer, thinking, today).encode(row, "prompt row")


def encode_training_row(tokenizer, row, thinking, where="training row"):
    """The last row of a conversation."""
    return training_rows(tokenizer, row, thinking, where)[-1]()
