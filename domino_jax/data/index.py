"""One pass over the data finds each row's place, length and usability. The result is stored for later starts."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from domino_jax.data.bad_rows import BadRows
from domino_jax.data.chat import DATE
from domino_jax.data.held_out import prompt_hash, prompt_of
from domino_jax.data.rows import ROW, Index, RowEncoder, has_anchor, read_span
from domino_jax.data.sources import DataFile
from domino_jax.runtime.environment import usable_cores
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.files import replacing
from domino_jax.runtime.json_files import read_json
from domino_jax.runtime.progress import Progress

FORMAT = 4
LINES_PER_TASK = 256
READ_BYTES = 1 << 26
ROWS_PER_WORKER = 4_096  # a process takes seconds to start; fewer rows are read faster without it
# A tokenizer is made of the first group of files that exists, with the settings beside it.
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
UNREAD = ("name_or_path", "transformers_version", "auto_map")  # keys of tokenizer_config.json that decide nothing


def fingerprint(files: Sequence[DataFile], encoder: RowEncoder) -> str:
    """Hex digits that change with any byte of the data, the tokenizer or its template, and the length."""
    parts = {
        "format": FORMAT,
        "files": [file.digest for file in files],
        "tokenizer": tokenizer_digest(encoder.tokenizer),
        "max_length": encoder.max_length,
        "thinking": encoder.thinking,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Hex digits that change with any content of the tokenizer's files and its template; "" without a tokenizer.

    How the JSON is spaced changes nothing. A tokenizer that was made without a folder is what it holds in memory.
    """
    if tokenizer is None:
        return ""
    folder = pathlib.Path(tokenizer.name_or_path)
    groups = TOKENIZER_FILES if tokenizer.name_or_path else ()
    made_of = next((names for names in groups if all((folder / name).is_file() for name in names)), None)
    if made_of:
        parts = {name: _content(folder / name) for name in (*made_of, *SETTINGS_FILES)}
    else:
        parts = {"memory": json.loads(tokenizer.backend_tokenizer.to_str())}
    parts |= {"chat_template": tokenizer.chat_template, "date": str(DATE)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _content(file: pathlib.Path) -> Any:
    """The JSON or text of one of a tokenizer's files, without its template; None where it is absent."""
    if not file.is_file():
        return None
    if file.suffix != ".json":
        return file.read_text(encoding="utf-8")
    raw = read_json(file)
    return {key: raw[key] for key in raw if key not in (*UNREAD, "chat_template")}


@dataclasses.dataclass(frozen=True)
class ProcessShare:
    """The part of the reading that this process does.

    cache: a local folder for the index and for unpacked files, of this machine or shared by all processes. rows: its
    rows of the global batch; None: all. primary_first: calls its argument in the run's first process, and in the
    others only after that, so that they find the result. report: prints a line about the data.
    """

    cache: pathlib.Path
    rows: slice | None = None
    primary_first: Callable[[Callable[[], Any]], Any] = lambda work: work()
    report: Callable[[str], None] = print


def load_or_build(
    files: Sequence[DataFile], encoder: RowEncoder, digest: str, share: ProcessShare, skip_bad: bool = False
) -> Index:
    """The stored index for data of this fingerprint, or a new one, which is then stored.

    Args:
      digest: fingerprint().
      skip_bad: rows that cannot be used are left out and counted.
    Raises DataError: rows that cannot be used, all of them in one message.
    """
    local = share.cache / f"index-{digest[:24]}-{encoder.vocab_size}.npz"

    def find_or_build() -> Index:
        index = _load(local)
        if index is None or (index.bad and not skip_bad):
            index, bad = _build(files, encoder)
            bad.settle("data.train", len(index.rows) + bad.count, skip_bad)
            local.parent.mkdir(parents=True, exist_ok=True)
            with replacing(local) as fresh, fresh.open("wb") as out:
                np.savez(out, **vars(index))
        return index

    return share.primary_first(find_or_build)


def _load(path: pathlib.Path) -> Index | None:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # np.load leaves a damaged one open
            return Index(**{field.name: arrays[field.name] for field in dataclasses.fields(Index)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # absent or damaged


def _build(files: Sequence[DataFile], encoder: RowEncoder) -> tuple[Index, BadRows]:
    spans = [_row_spans(file) for file in files]
    tasks = [
        (file, first, of_file[first : first + LINES_PER_TASK])
        for file, of_file in zip(files, spans, strict=True)
        for first in range(0, len(of_file), LINES_PER_TASK)
    ]
    measured, first_rows, counts, bad = [np.zeros(0, ROW)], {}, dict.fromkeys(files, 0), BadRows()
    progress = Progress("reading rows", sum(map(len, spans)))
    with _measure_all(tasks, encoder) as results:
        for (file, _, lines), (rows, bad_rows, tokens) in zip(tasks, results, strict=True):
            before = sum(counts.values())
            for token, place in zip(*tokens, strict=True):
                first_rows.setdefault(token, before + place)
            counts[file] += len(rows)
            measured.append(rows)
            bad.join(bad_rows)
            progress.advance(len(lines))
    index = Index(
        counts=np.asarray(list(counts.values()), np.int64),
        rows=np.concatenate(measured),
        tokens=np.fromiter(first_rows.keys(), np.int32),
        first_rows=np.fromiter(first_rows.values(), np.int64),
        bad=np.asarray(bad.count),
    )
    return index, bad


def _row_spans(file: DataFile) -> np.ndarray:
    """int64 [lines, 2]: start and end of every line."""
    ends, size = [np.zeros(0, np.int64)], 0
    with open(file.local, "rb") as data:
        while piece := data.read(READ_BYTES):
            ends.append(np.flatnonzero(np.frombuffer(piece, np.uint8) == ord("\n")) + size)
            size += len(piece)
    ends = np.concatenate(ends)
    if size and (not len(ends) or ends[-1] != size - 1):
        ends = np.append(ends, size)  # the last line has no newline
    return np.stack([np.concatenate([[0], ends[:-1] + 1])[: len(ends)], ends], axis=1)


@contextlib.contextmanager
def _measure_all(tasks: list, encoder: RowEncoder) -> Iterator[Iterator[tuple]]:
    """The results of `_measure` for every task, in order; by one process per core where there are many rows."""
    workers = min(usable_cores(), len(tasks) * LINES_PER_TASK // ROWS_PER_WORKER)
    if workers < 2:
        yield (_measure(encoder, *task) for task in tasks)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(encoder,)
    )
    try:
        yield pool.map(_measure_in_worker, tasks)
    except concurrent.futures.process.BrokenProcessPool as error:
        raise DominoError(f"one of {workers} processes that read rows ended (out of memory?); start again.") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _measure(encoder: RowEncoder, file: DataFile, first: int, spans: np.ndarray) -> tuple:
    """ROW [rows] for lines [first, first + len(spans)) of a file, the lines that cannot be used, and the different
    tokens of rows with an anchor with the place of the first row that has each."""
    out, bad, texts, places = [], BadRows(), [np.zeros(0, np.int32)], []
    base = int(spans[0, 0])
    block = read_span(file, base, int(spans[-1, 1]))
    for place, (start, end) in enumerate(spans.tolist()):
        number = first + place + 1
        line = block[start - base : end - base]
        if not line.strip():
            continue
        try:
            rows = encoder(line, f"{file.name}:{number}")
        except DataError as error:
            bad.add(error)
            continue
        prompt = prompt_of(rows[0].loss_mask)
        shared = prompt_hash(rows[0].token_ids[:prompt]), prompt_hash(encoder.asked(rows[0]))
        for part, row in enumerate(rows):
            usable = has_anchor(row.loss_mask)
            sizes = len(row.token_ids), int(row.loss_mask.sum()), usable
            out.append((start, end, number, part, *sizes, 0 if part else prompt, *shared))
            if usable:
                texts.append(row.token_ids)
                places += [len(out) - 1] * len(row.token_ids)
    tokens, firsts = np.unique(np.concatenate(texts), return_index=True)
    return np.array(out, ROW), bad, (tokens.tolist(), [places[first] for first in firsts])


_encoder: RowEncoder | None = None  # of this worker process


def _start_worker(encoder: RowEncoder) -> None:
    global _encoder
    _encoder = encoder
    logging.disable()  # the run warns once
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole job; the run ends its workers itself
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # those threads would compete with the other workers for cores
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker when its run is killed; it would otherwise wait for its next task for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _measure_in_worker(task: tuple) -> tuple:
    return _measure(_encoder, *task)
