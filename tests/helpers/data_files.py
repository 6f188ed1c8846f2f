"""Small files of training rows for the tests of the data pipeline."""

import dataclasses
import gzip
import json
import pathlib
import tempfile

from domino_jax.data.index import ProcessShare
from domino_jax.data.order import Layout
from domino_jax.data.pipeline import Batches, make_batches
from domino_jax.data.rows import RowEncoder

PADDED = Layout("pad", max_length=8, batch_size=4, window=4_096)
FOLDERS = tempfile.TemporaryDirectory(prefix="domino-data-")  # a new cache for each call, gone with the session


def row(first: int, length: int, mask: list[int] | None = None) -> dict:
    """Ids first, first + 1, …; all but the first supervised."""
    return {"token_ids": list(range(first, first + length)), "loss_mask": mask or [0] + [1] * (length - 1)}


def rows_of(lengths: list[int]) -> list[dict]:
    """Row k holds ids from 100 k on, so that a token shows its row."""
    return [row(100 * place, length) for place, length in enumerate(lengths)]


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_rows(folder: pathlib.Path, rows: list[dict], name: str = "rows.jsonl") -> pathlib.Path:
    """A file in the form of its name."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".gz"):
        file.write_bytes(gzip.compress(jsonl(rows)))
    else:
        file.write_bytes(jsonl(rows))
    return file


def batches_of(sources, tokenizer=None, **changes) -> Batches:
    """Silent batches of 4 rows of at most 8 tokens; `changes` name fields of Layout and ProcessShare, or arguments."""
    silent = ProcessShare(pathlib.Path(tempfile.mkdtemp(dir=FOLDERS.name)), report=lambda text: None)
    layout, share = (
        dataclasses.replace(start, **{name: changes.pop(name) for name in {*vars(start)} & {*changes}})
        for start in (PADDED, silent)
    )
    encoding = {"thinking": False, "vocab_size": None}
    encoding |= {name: changes.pop(name) for name in {*encoding} & {*changes}}
    encoder = RowEncoder(tokenizer, layout.max_length, **encoding)
    return make_batches(str(sources), encoder, layout, share, **{"seed": 0} | changes)


def take(batches: Batches, count: int, state: dict | None = None) -> list[dict]:
    """The first `count` batches from a position on."""
    with batches.start(state) as iterator:
        return [next(iterator) for _ in range(count)]


class BytesTokenizer:
    """Bytes are ids; a turn is R(text|) with R the role's first letter; an open A begins the assistant's."""

    chat_template, is_fast = "a turn is R(text|)", False

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, enable_thinking, **_):
        turns = "".join(f"{message['role'][0].upper()}({message['content']}|)" for message in messages)
        return turns + "A(" * add_generation_prompt

    def __call__(self, text, add_special_tokens):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, skip_special_tokens):
        return bytes(token for token in ids if token < 128 and token != ord("|")).decode()
