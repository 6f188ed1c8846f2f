"""JSONL files: rows with their line numbers, and the prompt rows of decode and regenerate."""

import io
import itertools
import json
import os
import pathlib
from collections.abc import Iterator

from domino_jax.data.references import reference_of
from domino_jax.data.sources import open_plain
from domino_jax.runtime import remote
from domino_jax.runtime.errors import DataError, DominoError, quote
from domino_jax.runtime.files import is_remote

PROMPT_KEYS = ("messages", "prompt", "token_ids")
LINE_LIMIT = 1 << 26  # bytes; a row of a million token ids has 7 MB
ID_LIMIT = 200
LARGEST_ID = 2**31 - 1  # ids are int32 on devices


def read_jsonl(path: str | pathlib.Path) -> Iterator[tuple[int, dict]]:
    """Line number (from 1) and object of every line that is not blank; a broken line is a DataError that names it.

    The file may be compressed (.gz, .zst) and may be in a bucket (gs://).
    """
    name = os.fspath(path)
    if not (remote.exists(name) if is_remote(name) else pathlib.Path(name).expanduser().is_file()):
        raise DominoError(f"{path}: there is no such file; name a JSONL file that exists.")
    with open_plain(name) as lines:
        lines = io.BufferedReader(lines)  # the files of some stores read whole lines only, however long
        for number in itertools.count(1):
            line = lines.readline(LINE_LIMIT + 1)
            if not line:
                return
            if line.strip():
                yield number, parse_row(line, f"{path}:{number}")


def check_line(size: int, where: str) -> None:
    """Refuse a line of more bytes than a row can have, before or after it is read."""
    if size > LINE_LIMIT:
        raise DataError(f"{where}: the line has more than {LINE_LIMIT} bytes. A JSONL file has one row on each line.")


def parse_row(line: bytes, where: str) -> dict:
    """The object of one line of JSONL; anything else is a DataError that names the place."""
    check_line(len(line), where)
    try:
        row = json.loads(line)
    except ValueError as error:  # broken JSON or bytes that are not UTF-8
        raise DataError(f"{where}: the line is not a JSON object ({error}). Correct or remove it.") from error
    except RecursionError as error:
        raise DataError(f"{where}: the line is nested too deeply to be read. Correct or remove it.") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: the line holds a {type(row).__name__}, expected a JSON object.")
    return row


def read_prompts(path: str | pathlib.Path, limit: int | None = None) -> list[dict]:
    """Prompt rows, each with exactly one of PROMPT_KEYS and an "id": the row's, or its place among the rows from "0".

    Other keys stay in the row; a "reference" is checked (references.py). Only the first `limit` rows are read.
    """
    rows, lines = [], {}
    for number, row in read_jsonl(path):
        if limit is not None and len(rows) >= limit:
            break
        row = {**row, "id": str(row["id"]) if "id" in row else str(len(rows))}
        if len(row["id"]) > ID_LIMIT or not row["id"].isprintable():
            raise DataError(
                f"{path}:{number}: the id is {quote(row['id'])}; an id has at most {ID_LIMIT} printable characters."
            )
        where = f"{path}:{number} (id {row['id']})"
        check_prompt(row, where)
        check_text(row, where)
        if row["id"] in lines:
            raise DataError(
                f"{path}:{number}: the id {row['id']} is also the id of line {lines[row['id']]}; make ids unique."
            )
        reference_of(row, where)
        lines[row["id"]] = number
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: the file holds no prompt rows.")
    return rows


def check_text(row: dict, where: str) -> None:
    """Refuse a row with half of a surrogate pair, which can be neither encoded nor written."""
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair ({error.object[error.start]!a}), which is not text; correct or"
            " remove it."
        ) from error


def check_prompt(row: dict, where: str) -> None:
    """Refuse a prompt row that does not have exactly one of PROMPT_KEYS, of the right kind."""
    found = [key for key in PROMPT_KEYS if key in row]
    if len(found) != 1:
        have = ", ".join(found) if found else quote_names(row)
        raise DataError(f"{where}: the row has {have}; a prompt row has exactly one of {', '.join(PROMPT_KEYS)}.")
    if found == ["messages"]:
        check_messages(row["messages"], where)
    elif found == ["prompt"]:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise DataError(f"{where}: prompt is {quote(row['prompt'])}, expected a text that is not empty.")
    else:
        check_token_ids(row["token_ids"], where)


def quote_names(row: dict) -> str:
    """The row's keys for a message."""
    return quote(", ".join(sorted(row)))[1:-1] or "nothing"


def check_messages(messages, where: str) -> None:
    """Refuse anything but a list of {"role", "content"} with texts in both."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list with at least one message.")
    for place, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        # A call of a tool may have no text; its template knows what to do with it.
        textless = content is None and isinstance(message, dict) and "tool_calls" in message
        if not isinstance(role, str) or not (isinstance(content, str) or textless):
            raise DataError(
                f'{where}: message {place} is {quote(message)}, expected {{"role": text, "content": text}}.'
            )


def check_token_ids(token_ids, where: str) -> None:
    """Refuse anything but a list of ids, at least one."""
    fine = isinstance(token_ids, list) and bool(token_ids)
    if not fine or not all(type(entry) is int and 0 <= entry <= LARGEST_ID for entry in token_ids):
        raise DataError(
            f"{where}: token_ids is {quote(token_ids)}, expected a list of at least one id from 0 to {LARGEST_ID}."
        )
