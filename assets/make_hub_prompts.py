"""Prompt rows of a public data set of conversations, for domino_jax.regenerate (docs/qwen3.md).

    pip install datasets
    python -m assets.make_hub_prompts --dataset=mlabonne/open-perfectblend --output=prompts.jsonl
    python -m assets.make_hub_prompts --dataset=ROWS.jsonl --output=prompts.jsonl --parts=8

Reads a data set of the hub (its split train) or a JSONL file, whose rows are ShareGPT {"conversations"} or
{"messages"}. Each becomes {"id": its place, "messages": the system's and the user's turns}: the target answers them
again, so the answers of the data set are left out. What has no user's turn, a role that no target answers, or more
than --max-characters is left out and counted. With --parts=8 every eighth row goes to the same one of
prompts-0-of-8.jsonl, ... : a file for each machine that shares no disk with the others.
"""

import argparse
import collections
import contextlib
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from domino_jax.data.chat import SHAREGPT_ROLES
from domino_jax.data.prompts import read_jsonl

# Longer prompts fill data.max_length of the Qwen3 recipes, 3,072 tokens, and leave nothing to train on.
MAX_CHARACTERS = 10_000


def user_turns(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a row that an answer can follow: the system's and the user's, up to the user's last one.

    Raises ValueError for a row that cannot be answered, with the reason.
    """
    if "messages" in row:
        turns = [(message["role"], message["content"]) for message in row["messages"]]
    else:
        turns = [(turn["from"], turn["value"]) for turn in row["conversations"]]
    messages = []
    for speaker, content in turns:
        role = SHAREGPT_ROLES[speaker] if speaker in SHAREGPT_ROLES else speaker
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"a turn of {speaker!r}")
        if role != "assistant":
            messages.append({"role": role, "content": content})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not all(message["content"] for message in messages):
        raise ValueError("no user's turn, or an empty one")
    return messages


def prompt_rows(
    rows: Iterable[Mapping[str, Any]], max_characters: int, left_out: collections.Counter
) -> Iterator[dict[str, Any]]:
    """Prompt rows in the order of the data set; `left_out` counts the others by their reason."""
    for place, row in enumerate(rows):
        try:
            messages = user_turns(row)
        except ValueError as error:
            left_out[str(error)] += 1
            continue
        if sum(len(message["content"]) for message in messages) > max_characters:
            left_out[f"more than {max_characters:,} characters"] += 1
            continue
        yield {"id": str(place), "messages": messages}


def dataset_rows(name: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a JSONL file, or of the split train of a data set of the hub."""
    if pathlib.Path(name).is_file():
        return (row for _, row in read_jsonl(name))
    import datasets  # large, and needed for the hub alone

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
        for row in prompt_rows(dataset_rows(arguments.dataset), arguments.max_characters, left_out):
            files[count % len(files)].write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    print(f"{count:,} prompts in {', '.join(map(str, names))}")
    for reason, number in left_out.most_common():
        print(f"left out: {number:,} with {reason}")


if __name__ == "__main__":
    main()
