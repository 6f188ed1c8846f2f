"""JSONL files: rows with their line numbers, and the prompt rows of decode and regenerate."""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from domino_jax.data.bad_rows import BadRows
from domino_jax.data.messages import EMPTY, FORMS, READ, REFUSED, Chat, present, quote_names, read_chat
from domino_jax.data.sources import find_files, open_plain
from domino_jax.runtime import remote
from domino_jax.runtime.errors import DataError, DominoError, check_value, quote
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.json_files import parse_json

PROMPT_KEYS = (*FORMS, "prompt", "token_ids")
ID_LIMIT = 200
LARGEST_ID = 2**31 - 1  # ids are int32 on devices


def read_jsonl(path: str | pathlib.Path) -> Iterator[tuple[int, dict]]:
    """Line number (from 1) and object of every line that is not blank; a broken line is a DataError that names it.

    The file may be compressed (.gz) and may be in a bucket (gs://).
    """
    for number, line in read_lines(path):
        yield number, parse_row(line, f"{path}:{number}")


def read_lines(path: str | pathlib.Path) -> Iterator[tuple[int, bytes]]:
    """As read_jsonl, with the bytes of each line."""
    name = os.fspath(path)
    if not (remote.exists(name) if is_remote(name) else pathlib.Path(name).expanduser().is_file()):
        raise DominoError(f"{path}: there is no such file; name a JSONL file that exists.")
    with open_plain(name) as lines:
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def parse_row(line: bytes, where: str) -> dict:
    """The object of one line of JSONL; DataError for anything else."""
    try:
        row = parse_json(line)
    except ValueError as error:  # broken JSON, bytes that are not UTF-8, or too many levels
        raise DataError(f"{where}: the line is not a JSON object ({error}). Correct or remove it.") from error
    check_value(isinstance(row, dict), f"{where}: the line", row, "a JSON object")
    return row


def read_prompts(
    path: str | pathlib.Path,
    limit: int | None = None,
    skip_bad: bool = False,
    check: Callable[[dict], Any] | None = None,
) -> list[dict]:
    """Prompt rows, each with an "id": the row's, or its place among the rows of all files from "0".

    A row has exactly one of messages (in the form of `Chat.as_row`), prompt and token_ids. Other keys stay in it.

    Args:
        path: a file, or a glob as data.train has it.
        limit: only the first `limit` rows are read.  skip_bad: rows that cannot be used are left out and counted.
        check: raises DataError for a row that the caller cannot use.
    Raises DataError: rows that cannot be used, all of them in one message; or there are no rows.
    """
    rows, lines, bad, total = [], {}, BadRows(), 0
    for line, where in lines_of(os.fspath(path)):
        if limit is not None and len(rows) >= limit:
            break
        try:
            row = read_prompt(line, where, str(total))
            if row["id"] in lines:
                raise DataError(f"{where}: the id {row['id']} is also the id of {lines[row['id']]}; make ids unique.")
            if check:
                check(row)
            lines[row["id"]] = where
            rows.append(row)
        except DataError as error:
            bad.add(error)
        total += 1
    bad.settle(os.fspath(path), total, skip_bad)
    if not rows:
        raise DataError(f"{path}: the file holds no prompt rows.")
    return rows


def lines_of(pattern: str) -> Iterator[tuple[bytes, str]]:
    """The bytes and FILE:LINE of every line that is not blank, of a file or of all that a glob names."""
    for file in find_files(pattern):
        yield from ((line, f"{file}:{number}") for number, line in read_lines(file))


def digest_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 of prompt rows: tells files with the same name and another content apart."""
    return hashlib.sha256(json.dumps([dict(row) for row in rows], sort_keys=True).encode()).hexdigest()


def read_prompt(line: bytes, where: str, place: str) -> dict:
    """The prompt row of one line; `place` is its id if it has none."""
    columns = present(parse_row(line, where))
    if any(form in columns for form in FORMS):
        columns.pop("prompt", None)  # UltraChat's rows have their first message there too; training does not read it
    row = {**columns, "id": str(columns["id"]) if "id" in columns else place}
    if len(row["id"]) > ID_LIMIT or not row["id"].isprintable():
        raise DataError(f"{where}: the id is {quote(row['id'])}; an id has at most {ID_LIMIT} printable characters.")
    where = f"{where} (id {row['id']})"
    chat = check_prompt(columns, where)
    check_text(row, where)
    return _asking(chat.as_row(row), where) if chat else row


def _asking(row: dict, where: str) -> dict:
    """A row of messages without the answers that end it, as rows of training have them."""
    messages = row["messages"]
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{where}: all messages are the assistant's, so there is nothing to answer; remove the row.")
    return {**row, "messages": messages}


def check_text(value: Any, where: str) -> None:
    """Refuse JSON values with half of a surrogate pair, which can be neither encoded nor written."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair ({error.object[error.start]!a}), which is not text; correct or"
            " remove it."
        ) from error


def check_prompt(row: Mapping[str, Any], where: str) -> Chat | None:
    """The conversation of a prompt row that has one. Refuses rows without exactly one of PROMPT_KEYS, of its kind."""
    row = present(row)
    keys = [key for key in PROMPT_KEYS if key in row]
    if len(keys) != 1:
        have = ", ".join(keys) if keys else quote_names(row)
        raise DataError(f"{where}: the row has {have}; a prompt row has exactly one of {', '.join(PROMPT_KEYS)}.")
    if keys[0] in FORMS:
        return read_chat(row, where)
    if keys == ["prompt"]:
        text = row["prompt"]
        check_value(isinstance(text, str) and text, f"{where}: prompt", text, "a text that is not empty")
        ignored = [key for key in (*READ, *REFUSED) if key in row and row[key] not in EMPTY]
        if ignored:
            raise DataError(
                f"{where}: the row has {ignored[0]} beside prompt, which is read as it is; give messages instead."
            )
    else:
        check_token_ids(row["token_ids"], where)
    return None


def check_token_ids(token_ids, where: str) -> None:
    """Refuse anything but a list of ids, at least one."""
    fine = isinstance(token_ids, list) and bool(token_ids)
    fine = fine and all(type(entry) is int and 0 <= entry <= LARGEST_ID for entry in token_ids)
    check_value(fine, f"{where}: token_ids", token_ids, f"a list of at least one id from 0 to {LARGEST_ID}")
