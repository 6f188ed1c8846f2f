"""The conversation of a row. Training rows, prompt rows and the script of hub prompts read it here.

A row has {"messages": [...]} or ShareGPT {"conversations": [...]}. Keys that change what the model reads are rendered
(system, tools, chat_template_kwargs) or refused by name; other columns (id, source, scores, ...) change nothing. A null
value is an absent one, in a row, in a message and at any depth of tools and tool_calls, where a table of many tools
gives each the parameters of all others. So is an empty column of these keys.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from domino_jax.runtime.errors import DataError, check_value, quote
from domino_jax.runtime.json_files import parse_json

FORMS = ("messages", "conversations")
READ = ("system", "tools", "chat_template_kwargs")
REFUSED = {
    "functions": "give tools",
    "system_prompt": "give system",
    "documents": "put their text into a message",
    "enable_thinking": 'give chat_template_kwargs {"enable_thinking": true or false}',
    "chat_template": "put the template into the target's folder",
    "loss_mask": "flag messages with train, or give token_ids",
}
EMPTY = ("", [], {})  # a table of many rows has a column for all if one row uses it
FLAGS = ("weight", "loss_mask", "train", "trainable")  # of a message: 0 or false makes an answer context
SPEAKERS = {name: name for name in ("system", "user", "assistant", "tool")}
SPEAKERS |= {"human": "user", "gpt": "assistant", "observation": "tool"}  # as ShareGPT has them
SPEAKERS["developer"] = "system"  # OpenAI's newer name


@dataclasses.dataclass(frozen=True)
class Chat:
    """messages: as the chat template reads them.  learned: of each message, False where its flag makes it context.

    variables: what the template reads besides messages: tools and the entries of chat_template_kwargs.
    """

    messages: list[dict[str, Any]]
    learned: list[bool]
    variables: dict[str, Any]

    def as_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row that this was read from in the form {"messages", "tools", "chat_template_kwargs"}."""
        rest = {key: value for key, value in row.items() if key not in (*FORMS, *READ)}
        variables = dict(self.variables)
        tools = {"tools": variables.pop("tools")} if "tools" in variables else {}
        extra = {"chat_template_kwargs": variables} if variables else {}
        return {**rest, "messages": self.messages, **tools, **extra}


def present(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that are not null."""
    return {key: value for key, value in columns.items() if value is not None}


def without_nulls(value: Any) -> Any:
    """A copy of JSON values whose objects have no null."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in present(value).items()}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def read_chat(row: Mapping[str, Any], where: str) -> Chat:
    """The conversation of a row.

    Raises DataError: neither or both of FORMS, a message of another form, a key of REFUSED.
    """
    row = present(row)
    forms = [key for key in FORMS if key in row]
    if len(forms) != 1:
        raise DataError(f"{where}: the row has {quote_names(row)}; it needs either messages or conversations.")
    for key, remedy in REFUSED.items():
        if key in row and row[key] not in EMPTY:
            raise DataError(
                f"{where}: the row has {key}, which changes what the model reads or learns and is not supported beside "
                f"{forms[0]}; {remedy} instead."
            )
    turns = row[forms[0]]
    check_value(isinstance(turns, list) and turns, f"{where}: {forms[0]}", turns, "a list of at least one message")
    messages, learned = [], []
    for place, turn in enumerate(turns):
        name = f"{where}: message {place} of {forms[0]}"
        message = _message(turn, forms[0], name)
        flags = {key: message.pop(key) for key in FLAGS if key in message}
        for key, flag in flags.items():
            check_value(flag in (0, 1), f"{name}: {key}", flag, "0, 1, true or false")
        messages.append(message)
        learned.append(all(flags.values()))
    system = row["system"] if "system" in row and row["system"] not in EMPTY else ""
    check_value(isinstance(system, str), f"{where}: system", system, "a text")
    if system and messages[0]["role"] == "system":
        raise DataError(
            f"{where}: system is {quote(system)}, and the first message is the system's too,"
            f" {quote(messages[0]['content'])}; give one of them."
        )
    if system:
        messages.insert(0, {"role": "system", "content": system})
        learned.insert(0, True)
    return Chat(messages, learned, _variables(row, where))


def _message(turn: Any, form: str, name: str) -> dict[str, Any]:
    """{"role", "content", ...} without null values, whatever the row's form."""
    fields = present(turn) if isinstance(turn, dict) else {}
    if "tool_calls" in fields:
        fields["tool_calls"] = without_nulls(fields["tool_calls"])
    keys = ("from", "value") if form == "conversations" and "role" not in fields else ("role", "content")
    role, content = (fields[key] if key in fields else None for key in keys)
    textless = content is None and "tool_calls" in fields and bool(fields["tool_calls"])
    texts = f'{{"{keys[0]}": text, "{keys[1]}": text}}; only a message with tool_calls may have no text'
    check_value(isinstance(role, str) and (isinstance(content, str) or textless), name, turn, texts)
    if keys[0] == "role":  # the template decides which others there are
        return {**fields, "role": SPEAKERS.get(role, role)}
    check_value(role in SPEAKERS, f"{name}: from", role, f"one of {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[role], "content": content} | {key: fields[key] for key in fields if key not in keys}


def _variables(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The template's variables in the row's columns; an empty column is an absent one."""
    kwargs = _json_column(row, "chat_template_kwargs", where)
    tools = _json_column(row, "tools", where)
    check_value(not kwargs or isinstance(kwargs, dict), f"{where}: chat_template_kwargs", kwargs, "an object")
    objects = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    check_value(not tools or objects, f"{where}: tools", tools, "a list of objects or its JSON text")
    variables = {**present(kwargs or {}), **({"tools": tools} if tools else {})}
    return {name: without_nulls(value) if name == "tools" else value for name, value in variables.items()}


def _json_column(row: Mapping[str, Any], key: str, where: str) -> Any:
    value = row.get(key)
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value.encode())
    except ValueError as error:
        raise DataError(f"{where}: {key} is {quote(value)}, which is no JSON; give its JSON text.") from error


def quote_names(row: Mapping[str, Any]) -> str:
    """The row's keys for a message."""
    return quote(", ".join(sorted(row)))[1:-1] or "nothing"
