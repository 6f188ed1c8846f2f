"""JSON files that are written whole and hold one value."""

import json
import pathlib
from typing import Any

from domino_jax.runtime.errors import DataError, quote
from domino_jax.runtime.file_kinds import HEAD_BYTES, refuse_other_kind
from domino_jax.runtime.files import write_whole


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a local file or an object in a bucket; ValueError for NaN and infinities, which JSON does not have."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object that a file holds, local or in a bucket.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    refuse_other_kind(str(path), text[:HEAD_BYTES])
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({quote(str(error))}); fetch or write it again.") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} is a JSON {type(value).__name__}; an object was expected.")
    return value
