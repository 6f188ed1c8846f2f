"""chat.py with a tokenizer of bytes: masks in special cases, forms of rows, refusals. Masks: test_chat_qwen.py."""

import datetime

import pytest

from domino_jax.runtime.errors import DataError
from tests.helpers.chat import TEMPLATE, encode_prompt, encode_training_row, make_tokenizer, marked, turns


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_no_token_straddles_the_start_of_an_answer():
    plain = make_tokenizer(
        "{% for m in messages %}{{ m.role + ':\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    )
    row = encode_training_row(plain, {"messages": turns("q", "\nx")}, thinking=False)
    assert marked(plain, row) == "user:\nq<|im_end|>assistant:\n[\nx<|im_end|>]"


def test_turns_after_the_last_answer_and_an_opening_answer_are_not_supervised(tokenizer):
    tail = encode_training_row(tokenizer, {"messages": turns("a", "b", "c")}, thinking=False)
    assert marked(tokenizer, tail).endswith("[b<|im_end|>]\n")
    opening = encode_training_row(tokenizer, {"messages": turns("-", "w", "a", "b")[1:]}, thinking=False)
    assert marked(tokenizer, opening).count("[") == 1 and "[b<|im_end|>]" in marked(tokenizer, opening)


def test_an_answer_that_is_flagged_is_context(tokenizer):
    messages = turns("a", "b", "c", "d", "e", "f")
    messages[1]["weight"] = messages[5]["train"] = 0
    row = encode_training_row(tokenizer, {"messages": messages}, thinking=True)
    assert marked(tokenizer, row).count("[") == 1 and marked(tokenizer, row).endswith("d<|im_end|>]\n")
    assert "assistant\nb<|im_end|>" in marked(tokenizer, row)


def test_tools_system_and_template_variables_of_a_row_reach_the_template():
    shows = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = make_tokenizer(
        "{% if tools %}{% for tool in tools %}{{ tool.name }} {% endfor %}{% endif %}{{ mood }} {{ enable_thinking }} "
        + shows
        + "{% if add_generation_prompt %}a:{% endif %}"
    )
    row = {"messages": turns("q", "r"), "system": "s", "tools": [{"name": "add"}]}
    row["chat_template_kwargs"] = {"mood": "calm", "enable_thinking": "high"}
    text = "add calm high s:s<|im_end|>u:q<|im_end|>a:"
    assert marked(tokenizer, encode_training_row(tokenizer, row, thinking=False)) == text + "[r<|im_end|>]"
    row["messages"] = turns("q")
    assert tokenizer.decode(encode_prompt(tokenizer, row, thinking=False)) == text


def test_token_rows_need_no_tokenizer():
    row = encode_training_row(None, {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, thinking=False)
    assert row.token_ids.tolist() == [5, 6, 7] and row.loss_mask.tolist() == [0, 1, 1]
    assert encode_prompt(None, {"token_ids": [5, 6]}, thinking=False) == [5, 6]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"token_ids": [1, 2], "loss_mask": [1]}, "token_ids has 2 entries, loss_mask has 1"),
        ({"token_ids": [1, 2], "loss_mask": [1, 2]}, "a 0 or 1 for each"),
        ({"messages": turns("a", "b<|im_end|>c")}, "message 1 contains '<|im_end|>' in its content"),
    ],
)
def test_a_row_of_another_form_is_refused_by_line(tokenizer, row, message):
    with pytest.raises(DataError) as refused:
        encode_training_row(tokenizer, row, thinking=False, where="rows.jsonl:4")
    assert message in str(refused.value) and "rows.jsonl:4" in str(refused.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        (
            "{{ messages|length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
            "message 3, the last one",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no special token"),
        ("{{ raise_exception('only tools') }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses the messages"),
        ("{{ cycler.__init__.__globals__.os.popen('true').read() }}", "refuses the messages"),
    ],
)
def test_a_template_that_cannot_be_followed_is_refused(template, message):
    with pytest.raises(DataError, match=message):
        encode_training_row(make_tokenizer(template), {"messages": turns("a", "b", "c", "d")}, thinking=False)


def test_an_answer_that_the_template_rewrites_as_history_is_context(tokenizer):
    """As Qwen3-2507-Thinking's: the generation prompt opens the thoughts, which earlier turns do not have."""
    asks = TEMPLATE.partition("  {%- if enable_thinking")[0] + "  {{- '<think>\n' }}\n{%- endif %}"
    rewriting = make_tokenizer(asks)
    thought = "<think>\nhm\n</think>\n\n"
    row = encode_training_row(rewriting, {"messages": turns("a", thought + "b", "c", thought + "d")}, thinking=True)
    assert marked(rewriting, row) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n[hm\n</think>\n\nd<|im_end|>]\n"
    )
    same = encode_training_row(tokenizer, {"messages": turns("a", "b", "c", "d")}, thinking=False)
    assert marked(tokenizer, same).count("[") == 2


def test_the_last_answer_is_refused_if_the_template_leaves_out_its_thoughts():
    """As older templates of distilled R1 models: what is left would be learned where the target writes its thoughts."""
    dropping = make_tokenizer(TEMPLATE.replace("(loop.last or thought)", "false"))
    with pytest.raises(DataError, match="leaves out the content of the answer of message 3"):
        encode_training_row(dropping, {"messages": turns("a", "b", "c", "<think>hm</think>d")}, thinking=True)
    apart = [*turns("a"), {"role": "assistant", "content": "b", "thinking": "hm"}]
    unread = make_tokenizer(TEMPLATE.replace("m.reasoning_content", "none"))
    with pytest.raises(DataError, match="leaves out the thinking of"):
        encode_training_row(unread, {"messages": apart}, thinking=True)


def test_a_turn_that_the_template_leaves_open_is_context_and_what_follows_it_is_not_supervised():
    open_calls = make_tokenizer(
        "{% for m in messages %}{{ m.role + ':' + m.content }}{{ '' if m.tool_calls else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    call = {"role": "assistant", "content": "f()", "tool_calls": [{"name": "f"}]}
    messages = [*turns("q"), call, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "Seven."}]
    row = encode_training_row(open_calls, {"messages": messages}, thinking=False)
    assert marked(open_calls, row) == "user:q<|im_end|>assistant:f()tool:7<|im_end|>assistant:[Seven.<|im_end|>]"


def test_what_a_template_never_reads_is_named_once(caplog):
    never = make_tokenizer(TEMPLATE.replace("enable_thinking", "thinks") + "{# tools #}{{ '' if mood else '' }}")
    row = {"messages": turns("Hi"), "tools": [{"name": "add"}], "chat_template_kwargs": {"mood": 1, "tone": 2}}
    for _ in range(3):
        encode_prompt(never, row, thinking=False)
    encode_prompt(never, {"messages": turns("Hi")}, thinking=True)
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 3 and "'tone'" in named[0] and "'tools'" in named[1] and "decode.thinking" in named[2]


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"role": "critic", "content": "Be brief."}, "the role 'critic', which the chat template leaves out"),
        ({"role": "Assistant", "content": "Hi."}, "the role 'Assistant'"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call, which the chat"),
    ],
)
def test_a_message_that_the_template_would_leave_out_is_refused(tokenizer, message, names):
    row = {"messages": [*turns("q"), message, *turns("-", "a")[1:]]}
    with pytest.raises(DataError, match=names):
        encode_training_row(tokenizer, row, thinking=False)
    with pytest.raises(DataError, match=names):
        encode_prompt(tokenizer, row, thinking=False)


def test_a_call_that_the_template_does_not_write_is_refused():
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": ""}}],
    }
    row = {"messages": [*turns("Hi"), call]}
    assert encode_training_row(make_tokenizer(), row, thinking=False).loss_mask.any()
    with pytest.raises(DataError, match="tool_calls, which the chat template does not write"):
        encode_training_row(make_tokenizer(TEMPLATE.replace("tool_calls", "calls")), row, thinking=False)


def test_todays_date_is_written_for_the_server_alone_and_a_fixed_one_into_rows_and_prompts(caplog):
    dated = make_tokenizer("{{- 'Today is ' + strftime_now('%-d %B %Y, %y') + '.<|im_end|>' }}" + TEMPLATE)
    prompt, tokens = {"messages": turns("q")}, {}
    for today in (False, True):
        tokens[today] = dated.decode(encode_prompt(dated, prompt, False, today=today))
    assert tokens[False].startswith("Today is 26 July 2024, 24.<|im_end|><|im_start|>user")
    assert f"{datetime.datetime.now():%Y}" in tokens[True] and "2024" not in tokens[True]
    row = encode_training_row(dated, {"messages": turns("q", "a")}, thinking=False)
    assert marked(dated, row).startswith("Today is 26 July 2024, 24.") and "[a<|im_end|>]" in marked(dated, row)
    assert caplog.text.count("writes today's date; rows and prompts of files have 2024-07-26") == 1
