"""The data pipeline at scale: the index that every new data set needs once, its memory, and reading beside a step.

    python -m benchmarks.device.data_pipeline --rows=1000000 --tokens=150 --processes 1 4

Conversations of two turns are made of the tiny target's prompts. Their lengths are log-normal with a mean of about
--tokens. For each number of processes a fresh process builds the index and reports its peak of memory; every index must
equal the first. Another fresh process then reads batches of 16 rows, padded to 3,072 tokens: of this file, and of one
whose rows fill all 3,072. It first reads as fast as it can and then one batch each second, as a training run at 16 rows
per second would, and reports the longest time that a step waited. --small: 40 rows, a test of the command.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import pathlib
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.tables import DOCS, ROOT, conditions, publish
from domino_jax.data import index
from domino_jax.data.index import ProcessShare
from domino_jax.data.order import Layout
from domino_jax.data.pipeline import make_batches
from domino_jax.data.rows import Index, RowEncoder
from domino_jax.data.sources import open_sources
from domino_jax.runtime.environment import usable_cores
from domino_jax.weights import hf

TARGET = ROOT / "assets" / "tiny_qwen3"
LENGTH, BATCH = 3_072, 16
WINDOW = 4_096
SPREAD = 0.7  # of the logarithm of a row's length
LONG_ROWS = 512  # of the second file: enough that no batch is read twice
FAST_BATCHES, PACED_BATCHES = 24, 20
STATUS = pathlib.Path("/proc/self/status")


def write_rows(file: pathlib.Path, tokenizer, count: int, tokens: int, spread: float = SPREAD) -> None:
    """Conversations of two turns; each begins with its number, so that all differ."""
    lines = (TARGET / "prompts_train.jsonl").read_text().splitlines()
    text = "\n".join(message["content"] for line in lines for message in json.loads(line)["messages"])
    letters = tokens * 10_000 / len(tokenizer.encode(text[:10_000])) / 2  # of a turn, in the mean
    sizes = letters * np.random.default_rng(0).lognormal(-(spread**2) / 2, spread, count)
    with file.open("w") as out:
        for number, size in enumerate(sizes.astype(int).clip(1, len(text) // 2).tolist()):
            start = number * 997 % (len(text) - size)
            part = text[start : start + size]
            turns = [{"role": "user", "content": f"{number} {part}"}, {"role": "assistant", "content": part}]
            out.write(json.dumps({"messages": turns}) + "\n")


def new_encoder() -> RowEncoder:
    return RowEncoder(hf.load_tokenizer(TARGET), LENGTH, False, None)


def peak_bytes() -> int:
    """The largest resident memory that this process has had."""
    [line] = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def apart(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """function(*arguments) in a fresh process, so that its memory is its own."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def index_file(file: pathlib.Path, cache: pathlib.Path, workers: int) -> dict[str, Any]:
    """Indexes a file into `cache`: seconds of the fingerprint and of the pass, and peaks of memory in bytes."""
    encoder, begin = new_encoder(), time.monotonic()
    sources = open_sources(str(file), cache)
    digest = index.fingerprint(sources, encoder)
    between, before = time.monotonic(), peak_bytes()
    built = index.load_or_build(sources, encoder, digest, ProcessShare(cache), workers=workers)
    return {
        "fingerprint_seconds": between - begin,
        "index_seconds": time.monotonic() - between,
        "before_bytes": before,
        "peak_bytes": peak_bytes(),
        "worker_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "index": {field.name: getattr(built, field.name) for field in dataclasses.fields(Index)},
    }


def read_file(file: pathlib.Path, cache: pathlib.Path, fast: int, paced: int) -> dict[str, Any]:
    """Reads `fast` batches at once and `paced` ones at one a second, through the index that is in `cache`."""
    share = ProcessShare(cache, report=lambda line: None)
    layout = Layout("pad", LENGTH, BATCH, WINDOW)
    batches, waits = make_batches(str(file), new_encoder(), layout, share, seed=0), [0.0]
    with batches.start() as iterator:
        next(iterator)
        begin = time.monotonic()
        for _ in range(fast):
            next(iterator)
        seconds = time.monotonic() - begin
        for _ in range(paced):
            time.sleep(1.0)
            begin = time.monotonic()
            next(iterator)
            waits.append(time.monotonic() - begin)
    tokens = float(batches.rows.lengths.mean())
    return {
        "rows_per_second": fast * BATCH / seconds,
        "wait": max(waits),
        "peak_bytes": peak_bytes(),
        "tokens": tokens,
    }


COLUMNS = {"what": "", "rows_s": "rows/s", "seconds": "seconds", "wait_ms": "longest wait at 16 rows/s, ms"}
COLUMNS |= {"peak_mb": "peak MB", "worker_mb": "peak MB of a worker"}


def rows_of(count: int, indexed: dict[int, dict], read: list[dict]) -> list[dict[str, Any]]:
    """One row for each number of processes that index, and for each file that is read."""
    rows = []
    for workers, one in indexed.items():
        row = {"what": f"index, {workers} processes", "rows_s": count / one["index_seconds"]}
        row |= {"seconds": one["index_seconds"], "peak_mb": one["peak_bytes"] / 1e6}
        rows.append(row | {"worker_mb": one["worker_bytes"] / 1e6 if workers > 1 else None})
    fingerprint = max(one["fingerprint_seconds"] for one in indexed.values())
    rows.append({"what": "a later start: fingerprint of the file", "seconds": fingerprint})
    for one in read:
        row = {"what": f"read rows of {one['tokens']:,.0f} tokens", "rows_s": one["rows_per_second"]}
        rows.append(row | {"wait_ms": one["wait"] * 1e3, "peak_mb": one["peak_bytes"] / 1e6})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    powers = [2**power for power in range(usable_cores().bit_length())]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--tokens", type=int, default=600, help="of a row, in the mean")
    parser.add_argument("--processes", type=int, nargs="+", default=powers, help="that index, one run for each number")
    parser.add_argument("--page", type=pathlib.Path, default=DOCS / "benchmarks.md")
    parser.add_argument("--small", action="store_true")
    choices = parser.parse_args(arguments)
    fast, paced, long_rows = FAST_BATCHES, PACED_BATCHES, LONG_ROWS
    if choices.small:
        choices.rows, choices.tokens, choices.processes = 40, 60, [1, 2]
        fast, paced, long_rows = 2, 1, 40
    tokenizer = hf.load_tokenizer(TARGET)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rows, longer = folder / "rows.jsonl", folder / "long.jsonl"
        write_rows(rows, tokenizer, choices.rows, choices.tokens)
        write_rows(longer, tokenizer, long_rows, LENGTH * 6 // 5, spread=0.0)  # cut to LENGTH
        indexed: dict[int, dict] = {}
        for workers in choices.processes:
            indexed[workers] = apart(index_file, rows, folder / str(workers), workers)
        first, *others = (one["index"] for one in indexed.values())
        for other in others:
            if not all(np.array_equal(first[name], other[name]) for name in first):
                raise SystemExit("two numbers of processes made two different indices.")
        read = [apart(read_file, file, folder / str(workers), fast, paced) for file in (rows, longer)]
    processes, tokens = " ".join(map(str, choices.processes)), read[0]["tokens"]
    flags = f"--rows={choices.rows} --tokens={choices.tokens} --processes {processes}"
    text = (
        f"`python -m benchmarks.device.data_pipeline {flags}`\n\nConversations of {tokens:.0f} tokens in "
        f"the mean, the tiny target's tokenizer. {conditions(('grain', 'tokenizers'))}"
    )
    print(publish(choices.page, "data_pipeline", rows_of(choices.rows, indexed, read), COLUMNS, text))


if __name__ == "__main__":
    main()
