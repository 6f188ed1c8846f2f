"""The files that data.train names: a file or a glob; JSONL, plain or .gz; local or gs://.

Files that commands keep beside rows match no glob: parts of an unfinished regeneration, whose rows are in the whole
file, and .meta.json. A file beside its compressed copy is refused, because its rows would be read twice.

Rows are read at random, so files from a bucket are copied into the cache folder once, and compressed files are unpacked
there once. Both get their final name only when complete, so several processes may share the folder, and a killed one
leaves no half-written file to read.
"""

import concurrent.futures
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import logging
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from domino_jax.runtime import remote
from domino_jax.runtime.errors import DataError, DominoError, warn_once
from domino_jax.runtime.file_kinds import HEAD_BYTES, refuse_other_kind
from domino_jax.runtime.files import is_remote, make_once

COMPRESSED = ".gz"
HASHING_THREADS = 4
_OURS = re.compile(r".+(\.part-\d+-of-\d+\.jsonl|\.meta\.json)")  # of answer_files.py

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DataFile:
    """name: for messages; local: path of a copy with random access; digest: of its bytes."""

    name: str
    local: str
    digest: str


def open_files(pattern: str, cache: pathlib.Path) -> list[DataFile]:
    """The files of data.train, with random access to each.

    Args:
      pattern: "rows.jsonl" or "rows/*.jsonl.gz"; local or gs://.
      cache: a local folder for copies, created on demand.
    Raises DominoError: a pattern that matches nothing. DataError: a compressed file that is damaged.
    """
    with concurrent.futures.ThreadPoolExecutor(HASHING_THREADS) as threads:
        return list(threads.map(lambda name: _bring(name, cache), find_files(pattern)))


def find_files(pattern: str) -> list[str]:
    """The files that a path or glob names, sorted; a DominoError without any."""
    local = os.path.expanduser(pattern)
    if is_remote(pattern):
        names = _remote_matches(pattern)
    elif os.path.isfile(local):  # also one with a bracket in its name
        names = [local]
    else:
        names = _rows_among(filter(os.path.isfile, glob.glob(local, recursive=True)))
    twice = sorted({name + COMPRESSED for name in names} & set(names))
    if names and not twice:
        return names
    problem = ": there is no such file. Name JSONL files that exist"
    if twice:
        problem = (
            f" names {twice[0]} and {twice[0].removesuffix(COMPRESSED)}, so their rows would be read twice; move one of"
            " them away, or name fewer files"
        )
    elif not is_remote(pattern) and os.path.isdir(local):
        problem = f" is a folder; name its files, as {pattern.rstrip('/')}/*.jsonl"
    elif not is_remote(pattern) and os.path.exists(local):
        problem = " is a pipe; write its rows into a file first"
    elif glob.has_magic(pattern):
        problem = ": no file matches. Name JSONL files that exist"
    raise DominoError(f"{pattern}{problem}.")


def _remote_matches(pattern: str) -> list[str]:
    with remote.access(pattern):
        if remote.exists(pattern):
            return [pattern]
        if not glob.has_magic(pattern):
            return []
        parts = pattern.split("/")
        fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
        base = remote.open_path("/".join(parts[:fixed]))
        return _rows_among(os.fspath(path) for path in base.glob("/".join(parts[fixed:])))


def _rows_among(matches: Iterable[str]) -> list[str]:
    """The files that a glob names, sorted, without those that commands keep beside rows."""
    names = sorted(matches)
    rows = [name for name in names if not _OURS.fullmatch(os.path.basename(name))]
    parts = [name for name in set(names).difference(rows) if name.endswith(".jsonl")]
    if parts:
        warn_once(
            log,
            f"{min(parts)} is a part of a regeneration that was not finished, and is not read: start"
            " domino_jax.regenerate again, which makes one file of all parts.",
        )
    return rows


@contextlib.contextmanager
def open_plain(name: str) -> Iterator[BinaryIO]:
    """The decompressed bytes of a local or remote file of rows; a DataError if it is damaged or of another kind."""
    packed = name.endswith(COMPRESSED)
    with contextlib.ExitStack() as stack:
        if is_remote(name):
            stack.enter_context(remote.access(name))
            raw = stack.enter_context(remote.open_path(name).open("rb"))
        else:
            raw = stack.enter_context(open(os.path.expanduser(name), "rb"))
        head = raw.read(HEAD_BYTES)
        raw.seek(0)
        refuse_other_kind(name, head, rows=not packed)
        if not packed:
            yield raw
            return
        try:
            plain = stack.enter_context(gzip.GzipFile(fileobj=raw))
            refuse_other_kind(name, plain.peek(HEAD_BYTES)[:HEAD_BYTES], rows=True)
            yield plain
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{name} is not an intact gzip file ({error}). Copy it again.") from error


def _bring(name: str, cache: pathlib.Path) -> DataFile:
    """A file with random access: `name` itself, or a copy that is made unless it exists."""
    local = os.fspath(_fetch(name, cache)) if is_remote(name) else name
    digest = _digest(local, name)
    if name.endswith(COMPRESSED):
        # Named by its bytes, so that a replaced file is unpacked again whatever its date.
        local = make_once(cache / "unpacked" / f"{digest[:32]}.jsonl", lambda target: _unpack(local, target))
    return DataFile(name, os.path.abspath(os.path.expanduser(local)), digest)


def _fetch(name: str, cache: pathlib.Path) -> pathlib.Path:
    with remote.access(name):
        store = remote.filesystem(name)
        info = store.info(name)
        # Every write changes the generation, even with the same size in the same second.
        key = hashlib.sha256(f"{name} {info['size']} {info['generation']}".encode()).hexdigest()[:32]
        target = cache / "fetched" / f"{key}-{name.rsplit('/', 1)[-1]}"
        return make_once(target, lambda fresh: store.get_file(name, os.fspath(fresh)))


def _unpack(local: str, target: pathlib.Path) -> None:
    with open_plain(local) as plain, target.open("wb") as out:
        shutil.copyfileobj(plain, out, 1 << 22)


def _digest(local: str, name: str) -> str:
    with open(os.path.expanduser(local), "rb") as file:
        refuse_other_kind(name, file.read(HEAD_BYTES), rows=not name.endswith(COMPRESSED))
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()
