"""JSON text as it is read everywhere, and JSON files that are written whole and hold one value."""

import json
import pathlib
from typing import Any

from domino_jax.runtime.errors import DataError, quote
from domino_jax.runtime.file_kinds import HEAD_BYTES, refuse_other_kind
from domino_jax.runtime.files import write_whole

DEEPEST = 100  # levels of objects and lists: what walks them may call itself for each


def parse_json(text: bytes) -> Any:
    """The value of a JSON text; ValueError where it holds none, or one of more than DEEPEST levels."""
    try:
        value = json.loads(text)
        level = [[value]] if text.count(b"{") + text.count(b"[") > DEEPEST else []
        for _ in range(DEEPEST + 1):
            parts = [part.values() if isinstance(part, dict) else part for part in level]
            level = [child for part in parts for child in part if isinstance(child, dict | list)]
    except RecursionError:
        level = [text]
    if level:
        raise ValueError("nested too deeply")
    return value


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a local file or an object in a bucket; ValueError for NaN and infinities, which JSON does not have."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object that a file holds, local or in a bucket.

    Raises DataError: it cannot be read, or holds something else.
    """
    try:
        text = path.read_bytes()
        refuse_other_kind(str(path), text[:HEAD_BYTES])
        value = parse_json(text)
        if isinstance(value, dict):
            return value
        problem = f"is a JSON {type(value).__name__}; an object was expected"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        problem = f"is not valid JSON ({quote(str(error))}); fetch or write it again"
    raise DataError(f"{path} {problem}.")
