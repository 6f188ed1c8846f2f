"""Prompt rows of a public data set of conversations, for domino_jax.regenerate (docs/qwen3.md).

    pip install datasets
    python -m assets.make_hub_prompts --dataset=mlabonne/open-perfectblend --output=prompts.jsonl
    python -m assets.make_hub_prompts --dataset=ROWS.jsonl --output=prompts.jsonl --parts=8

Reads a data set of the hub (its split train) or a JSONL file, whose rows are ShareGPT {"conversations"} or
{"messages"}, as domino_jax.train reads them (docs/commands.md#rows). Each becomes {"id": its place, "messages": the
system's and the user's turns}: the target answers them again, so the answers of the data set are left out. Rows of
another form, without a user's turn, with a role that no target answers, or with more than --max-characters are left out
and counted. With --parts=8 every eighth row goes to the same one of
prompts-0-of-8.jsonl, ... : a file for each machine that shares no disk with the others.
"""

import argparse
import collections
import contextlib
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from domino_jax.data.messages import read_chat
from domino_jax.data.prompts import check_text, parse_row, read_lines
from domino_jax.decoding.conversations import split_turns
from domino_jax.runtime.errors import DataError, DominoError

# Longer prompts fill data.max_length of the Qwen3 recipes, 3,072 tokens, and leave nothing to train on.
MAX_CHARACTERS = 10_000


def kind_of(message: str) -> str:
    """The message without its values and its place, the same for rows that are wrong in the same way."""
    text = message.partition(": ")[2] or message
    return re.sub(r"'.*'|\".*\"|\{.*\}|\[.*\]|\d+", "…", text)[:100]


def prompt_of(row: Mapping[str, Any] | bytes, place: int, max_characters: int) -> dict[str, Any]:
    """The prompt row of a conversation: the system's and the user's messages, up to the user's last one.

    Raises DataError for a row that cannot be answered.
    """
    where = f"row {place}"
    chat = read_chat(parse_row(row, where) if isinstance(row, bytes) else row, where)
    messages = [message for turn in split_turns(chat.messages, where) for message in turn]
    texts = [message["content"] if "content" in message else "" for message in messages]
    if not all(texts):
        raise DataError(f"{where}: a message has no text")
    if sum(map(len, texts)) > max_characters:
        raise DataError(f"{where}: the messages have more than --max-characters")
    prompt = {**chat.as_row({"id": str(place)}), "messages": messages}
    check_text(prompt, where)
    return prompt


def dataset_rows(name: str) -> Iterable[Mapping[str, Any] | bytes]:
    """The lines of a JSONL file, or the rows of the split train of a data set of the hub."""
    if name.startswith(("/", ".", "~")) or pathlib.Path(name).exists():
        return (line for _, line in read_lines(name))
    try:
        import datasets  # large, and needed for the hub alone
    except ImportError:
        raise DominoError(f"{name} is no file here, and a data set of the hub needs pip install datasets.") from None

    return datasets.load_dataset(name, split="train", streaming=True)


def part_names(output: pathlib.Path, parts: int) -> list[pathlib.Path]:
    if parts == 1:
        return [output]
    return [output.with_name(f"{output.stem}-{part}-of-{parts}{output.suffix}") for part in range(parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="a hub id, or a JSONL file")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="a JSONL file")
    parser.add_argument("--parts", type=int, default=1, help="files to divide the prompts among")
    parser.add_argument("--max-characters", type=int, default=MAX_CHARACTERS, help="of a prompt, all turns together")
    arguments = parser.parse_args()
    left_out: collections.Counter = collections.Counter()
    count = 0
    with contextlib.ExitStack() as stack:
        names = part_names(arguments.output, arguments.parts)
        files = [stack.enter_context(name.open("w", encoding="utf-8")) for name in names]
        for place, row in enumerate(dataset_rows(arguments.dataset)):
            try:
                prompt = prompt_of(row, place, arguments.max_characters)
            except DataError as error:
                left_out[kind_of(str(error))] += 1
                continue
            files[count % len(files)].write(json.dumps(prompt, ensure_ascii=False) + "\n")
            count += 1
    print(f"{count:,} prompts in {', '.join(map(str, names))}")
    for reason, number in left_out.most_common():
        print(f"left out: {number:,} rows: {reason}")


if __name__ == "__main__":
    try:
        main()
    except DominoError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
