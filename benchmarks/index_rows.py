"""Rows per second of the indexing pass that every new data set needs once, by the number of processes.

    python -m benchmarks.index_rows --rows=40000 --tokens=600

Conversations of about that many tokens are made of the tiny target's prompts, and indexed by 1, 2, 4, … processes up
to the number of cores. Every index is compared with the first: they have to be equal.
"""

import argparse
import dataclasses
import json
import pathlib
import tempfile
import time

import numpy as np

from domino_jax.data import index
from domino_jax.data.rows import RowEncoder
from domino_jax.data.sources import open_sources
from domino_jax.runtime.cores import usable
from domino_jax.weights import hf

TARGET = pathlib.Path(__file__).resolve().parents[1] / "assets" / "tiny_qwen3"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--tokens", type=int, default=600, help="per row, about")
    arguments = parser.parse_args()
    tokenizer = hf.load_tokenizer(TARGET)
    encoder = RowEncoder(tokenizer, 3_072, False, None)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "rows.jsonl"
        write_rows(file, tokenizer, arguments.rows, arguments.tokens)
        sources = open_sources(str(file), pathlib.Path(folder))
        digest, first = index.fingerprint(sources, encoder), None
        for workers in sorted({*(2**power for power in range(usable().bit_length())), usable()}):
            storage = index.Storage(pathlib.Path(folder) / str(workers))
            started = time.monotonic()
            found = index.load_or_build(sources, encoder, digest, storage, workers=workers, progress=False)
            seconds = time.monotonic() - started
            first = first or found
            same = all(np.array_equal(*(getattr(one, field.name) for one in (first, found))) for field in FIELDS)
            print(f"{workers} processes: {arguments.rows / seconds:,.0f} rows/s, {seconds:.1f} s, equal: {same}")


FIELDS = dataclasses.fields(index.Index)


def write_rows(file: pathlib.Path, tokenizer, count: int, tokens: int) -> None:
    """Conversations of two turns; each begins with its number, so that all differ."""
    lines = (TARGET / "prompts_train.jsonl").read_text().splitlines()
    texts = [message["content"] for line in lines for message in json.loads(line)["messages"]]
    text = "\n".join(texts)
    letters = tokens * len(text[:10_000]) // max(len(tokenizer.encode(text[:10_000])), 1) // 2
    with file.open("w") as out:
        for number in range(count):
            start = number * 997 % (len(text) - letters)
            part = text[start : start + letters]
            turns = [{"role": "user", "content": f"{number} {part}"}, {"role": "assistant", "content": part}]
            out.write(json.dumps({"messages": turns}) + "\n")


if __name__ == "__main__":
    main()
