"""messages.py: the one reader of conversations; what it uses, what it ignores, what it refuses by name."""

import json

import pytest

from domino_jax.data.messages import read_chat
from domino_jax.data.prompts import read_prompt
from domino_jax.runtime.errors import DataError

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, ANSWER], "conversations": None, "tools": None, "id": 3, "scores": [1.5]},
        {"messages": [USER | {"name": None, "weight": None}, ANSWER | {"tool_calls": None}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": [USER, ANSWER], "tools": "", "system": [], "chat_template_kwargs": {}},
        {"messages": [USER, ANSWER], "functions": [], "documents": {}, "system_prompt": ""},
        {"messages": [USER | {"role": "human"}, ANSWER | {"role": "gpt"}]},
    ],
)
def test_every_form_of_a_conversation_reads_the_same(row):
    chat = read_chat(row, "row")
    assert chat.messages == [USER, ANSWER] and chat.learned == [True, True] and chat.variables == {}


def test_system_tools_and_template_variables_are_read():
    row = {"messages": [USER], "system": "s", "tools": json.dumps(TOOLS), "id": "7"}
    row["chat_template_kwargs"] = {"enable_thinking": True, "effort": None}
    chat = read_chat(row, "row")
    assert chat.messages == [{"role": "system", "content": "s"}, USER]
    assert read_chat({"messages": [{"role": "developer", "content": "s"}, USER]}, "row").messages == chat.messages
    assert chat.variables == {"enable_thinking": True, "tools": TOOLS}
    assert read_chat(row | {"tools": TOOLS}, "row") == chat
    again = chat.as_row(row)
    assert again == {
        "id": "7",
        "messages": chat.messages,
        "tools": TOOLS,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    assert read_chat(again, "row") == chat


def test_a_null_inside_tools_and_calls_is_as_if_it_were_absent():
    def row(filled, text=False, kwargs=False):
        absent = {"ticker": None} if filled else {}
        schema = {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", None]} | absent} | absent,
        }
        tools = [{"type": "function", "function": {"name": "weather", "parameters": schema} | absent}]
        call = {"function": {"name": "weather", "arguments": {"city": "Oslo", "days": [{"of": 1} | absent]} | absent}}
        turns = [USER, ANSWER | {"tool_calls": [call | absent]}]
        tools = {"tools": json.dumps(tools) if text else tools}
        return {"messages": turns} | ({"chat_template_kwargs": tools} if kwargs else tools)

    plain = read_chat(row(False), "row")
    assert read_chat(row(True), "row") == read_chat(row(True, text=True), "row") == plain
    assert read_chat(row(True, kwargs=True), "row") == plain
    assert plain.variables["tools"][0]["function"]["parameters"]["properties"]["city"]["enum"] == ["Oslo", None]
    assert read_prompt(json.dumps(row(True)).encode(), "row", "0") == read_prompt(
        json.dumps(row(False)).encode(), "row", "0"
    )


@pytest.mark.parametrize("flag", ["weight", "loss_mask", "train", "trainable"])
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_a_flag_makes_an_answer_context(flag, form):
    turns = [USER, ANSWER] if form == "messages" else [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    for value, learned in ((0, False), (False, False), (1.0, True), (True, True), (None, True)):
        chat = read_chat({form: [turns[0], turns[1] | {flag: value}]}, "row")
        assert chat.learned == [True, learned] and chat.messages == [USER, ANSWER]


def test_a_tool_call_needs_no_text():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    assert read_chat({"messages": [USER, call]}, "row").messages[1] == {k: call[k] for k in ("role", "tool_calls")}


BAD_ROWS = [
    ({"text": "a"}, "text"),
    ({"messages": [USER], "conversations": [USER]}, "conversations, messages"),
    ({"messages": []}, "messages is [], expected a list"),
    ({"messages": [{"role": "user"}]}, "message 0 of messages"),
    ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "message 1 of messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "message 0 of messages"),
    ({"conversations": [{"from": "alien", "value": "a"}]}, "'alien'"),
    ({"messages": [ANSWER | {"weight": 0.5}]}, "weight is 0.5"),
    ({"messages": [{"role": "system", "content": "s"}, USER], "system": "t"}, "system is 't'"),
    ({"messages": [USER], "tools": "no json"}, "tools"),
    ({"conversations": [USER], "functions": [{}]}, "functions"),
    ({"messages": [USER], "enable_thinking": False}, "enable_thinking"),
    ({"messages": [USER], "loss_mask": [0]}, "loss_mask"),
]


@pytest.mark.parametrize(("row", "named"), BAD_ROWS)
def test_what_cannot_be_read_is_refused_by_name(row, named):
    with pytest.raises(DataError) as refused:
        read_chat(row, "rows.jsonl:4")
    assert named in str(refused.value) and str(refused.value).startswith("rows.jsonl:4: ")
