"""The files that data.train names: a file, a glob or a weighted mixture; JSONL, plain, .gz or .zst; gs://.

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
import io
import math
import os
import pathlib
import shutil
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from domino_jax.runtime import remote
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.file_kinds import HEAD_BYTES, refuse_other_kind
from domino_jax.runtime.files import is_remote, make_once

COMPRESSED = (".gz", ".zst")
PIECE_BYTES = 1 << 16
ZSTD_BYTES = 1 << 10  # read at once: a piece is decompressed whole, and a byte may expand to 30,000
HASHING_THREADS = 4


@dataclasses.dataclass(frozen=True)
class DataFile:
    """name: for messages; local: path of a copy with random access; digest: of its bytes."""

    name: str
    local: str
    digest: str


@dataclasses.dataclass(frozen=True)
class Source:
    """One pattern of a mixture, its share of the rows (shares sum to 1), and its files, sorted."""

    pattern: str
    weight: float
    files: tuple[DataFile, ...]


def open_sources(text: str, cache: pathlib.Path) -> tuple[Source, ...]:
    """The sources of data.train, with random access to each file.

    Args:
      text: "rows.jsonl", "rows/*.jsonl.gz" or "A.jsonl=0.7,B/*.zst=0.3"; paths are local or gs://.
      cache: a local folder for copies, created on demand.
    Raises:
      DominoError: a pattern that matches nothing, a weight that is not a number above 0, a missing package.
      DataError: a compressed file that is damaged.
    """
    parts = parse_sources(text)
    total = math.fsum(weight for _, weight in parts)
    sources = []
    with concurrent.futures.ThreadPoolExecutor(HASHING_THREADS) as threads:
        for pattern, weight in parts:
            files = threads.map(lambda name: _bring(name, cache), find_files(pattern))
            sources.append(Source(pattern, weight / total, tuple(files)))
    return tuple(sources)


def parse_sources(text: str) -> list[tuple[str, float]]:
    """(pattern, weight) of every part. A path or glob that matches files may hold = and commas; it is the only part."""
    if _matches(text):
        return [(text, 1.0)]
    parts = [_parse_part(part.strip()) for part in text.split(",")]
    if len(parts) > 1:
        for pattern, weight in parts:
            if weight is None:
                raise DominoError(
                    f"data.train: {pattern or 'an empty part'} has no weight in {text}; a mixture is written "
                    "A.jsonl=0.7,B.jsonl=0.3."
                )
    return [(pattern, 1.0 if weight is None else weight) for pattern, weight in parts]


def _parse_part(part: str) -> tuple[str, float | None]:
    pattern, equals, tail = part.rpartition("=")
    if not equals or "/" in tail:  # a path that holds an equals sign
        return part, None
    try:
        weight = float(tail)
    except ValueError:
        weight = math.nan
    if 0 < weight < math.inf:
        return pattern, weight
    raise DominoError(
        f"data.train: there is no file {part}, and {tail!r} is not a number above 0, so it is no weight either.\n"
        "Name an existing file, or a mixture as A.jsonl=0.7,B.jsonl=0.3."
    )


def find_files(pattern: str) -> list[str]:
    """The files that a path or glob names, sorted; a DominoError without any."""
    names = _matches(pattern)
    if names:
        return names
    if not is_remote(pattern) and os.path.isdir(os.path.expanduser(pattern)):
        raise DominoError(f"{pattern} is a folder; name its files, as {pattern.rstrip('/')}/*.jsonl.")
    if glob.has_magic(pattern):
        raise DominoError(f"{pattern}: no file matches. Name JSONL files that exist.")
    raise DominoError(f"{pattern}: there is no such file. Name a JSONL file that exists.")


def _matches(pattern: str) -> list[str]:
    if is_remote(pattern):
        return _remote_matches(pattern)
    path = os.path.expanduser(pattern)
    if os.path.isfile(path):
        return [path]
    # The part that exists is taken literally: a folder may be called "[v2] rows".
    parts = path.split("/")
    fixed = next(
        count for count in range(len(parts), -1, -1) if count == 0 or os.path.exists("/".join(parts[:count]) or "/")
    )
    literal = [glob.escape(part) for part in parts[:fixed]]
    names = glob.glob("/".join([*literal, *parts[fixed:]]), recursive=True)
    return sorted(name for name in names if os.path.isfile(name))


def _remote_matches(pattern: str) -> list[str]:
    with remote.access(pattern):
        if remote.exists(pattern):
            return [pattern]
        if not glob.has_magic(pattern):
            return []
        parts = pattern.split("/")
        fixed = next(place for place, part in enumerate(parts) if glob.has_magic(part))
        base = remote.open_path("/".join(parts[:fixed]))
        return sorted(os.fspath(path) for path in base.glob("/".join(parts[fixed:])))


@contextlib.contextmanager
def open_plain(name: str) -> Iterator[BinaryIO]:
    """The decompressed bytes of a local or remote file of rows; a file of another kind is a DataError."""
    with contextlib.ExitStack() as stack:
        if is_remote(name):
            stack.enter_context(remote.access(name))
            raw = stack.enter_context(remote.open_path(name).open("rb"))
        else:
            raw = stack.enter_context(open(os.path.expanduser(name), "rb"))
        head = raw.read(HEAD_BYTES)
        raw.seek(0)
        refuse_other_kind(name, head, rows=not name.endswith(COMPRESSED))
        if name.endswith(COMPRESSED):
            pieces = _gzip_pieces(raw, name) if name.endswith(".gz") else _zstd_pieces(raw, name)
            plain = io.BufferedReader(_PieceReader(pieces), PIECE_BYTES)
            refuse_other_kind(name, plain.peek(HEAD_BYTES)[:HEAD_BYTES], rows=True)
            yield plain
        else:
            yield raw


def _gzip_pieces(raw: BinaryIO, name: str) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as plain:
        try:
            while piece := plain.read(PIECE_BYTES):
                yield piece
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{name} is not an intact gzip file ({error}). Copy it again.") from error


def _zstd_pieces(raw: BinaryIO, name: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DominoError(f"{name}: reading .zst needs a package: pip install zstandard.") from error
    frame = None
    try:
        while piece := raw.read(ZSTD_BYTES):
            while piece:  # an archive may hold several frames
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(piece)
                piece = frame.unused_data
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise DataError(f"{name} is not an intact zstd file ({error}). Copy it again.") from error
    if frame is not None:  # zstandard itself accepts a truncated archive
        raise DataError(f"{name} is not an intact zstd file (it ends inside a frame). Copy it again.")


class _PieceReader(io.RawIOBase):
    """A readable file over byte strings."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def _bring(name: str, cache: pathlib.Path) -> DataFile:
    """A file with random access: `name` itself, or a copy that is made unless it exists."""
    local = os.fspath(_fetched(name, cache)) if is_remote(name) else name
    digest = _digest(local, name)
    if name.endswith(COMPRESSED):
        # Named by its bytes, so that a replaced file is unpacked again whatever its date.
        local = make_once(cache / "unpacked" / f"{digest[:32]}.jsonl", lambda target: _unpack(local, name, target))
    return DataFile(name, os.path.abspath(os.path.expanduser(local)), digest)


def _fetched(name: str, cache: pathlib.Path) -> pathlib.Path:
    with remote.access(name):
        address = remote.open_path(name)
        info = remote.filesystem(name).info(name)
        # Every write changes the generation, even with the same size in the same second.
        key = hashlib.sha256(f"{name} {info['size']} {info['generation']}".encode()).hexdigest()[:32]

        def copy(target: pathlib.Path) -> None:
            with address.open("rb") as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 22)

        return make_once(cache / "fetched" / f"{key}-{name.rsplit('/', 1)[-1]}", copy)


def _unpack(local: str, name: str, target: pathlib.Path) -> None:
    try:
        with open_plain(local) as plain, target.open("wb") as out:
            shutil.copyfileobj(plain, out, 1 << 22)
    except OSError as error:
        raise DominoError(f"{name} cannot be unpacked to {target.parent}: {error}. Free some space there.") from error


def _digest(local: str, name: str) -> str:
    try:
        with open(os.path.expanduser(local), "rb") as file:
            refuse_other_kind(name, file.read(HEAD_BYTES), rows=not name.endswith(COMPRESSED))
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DominoError(f"{local} cannot be read: {error.strerror}.") from error
