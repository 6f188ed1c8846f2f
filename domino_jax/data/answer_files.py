"""The files of a regeneration: rows appended as they are answered, and at the end one file in the prompts' order.

OUTPUT                       the rows; while one process answers alone, it appends to this file
OUTPUT.part-<i>-of-<n>.jsonl the rows that process i of n has answered so far
OUTPUT.meta.json             what all of them were made with; other settings are refused

A row counts once its line is whole. Whatever died and whenever, and however many processes go on: what stands whole in
any of the files is not asked again, and the merged file replaces OUTPUT in one step before a part is removed.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.runtime.errors import DataError, DominoError, unwritable
from domino_jax.runtime.files import is_remote, replacing, write_whole


@dataclasses.dataclass(frozen=True)
class Share:
    """Which part of a common work this process has; barrier(name) returns when all processes have reached it."""

    index: int = 0
    count: int = 1
    barrier: Callable[[str], None] = lambda name: None


ALONE = Share()


def local_output(output: str | os.PathLike) -> Path:
    """The path of an output that rows can be appended to."""
    if is_remote(output):
        raise DominoError(
            f"{output}: rows are appended as they are answered, which no object store can do.\n"
            "Write to a folder that all processes share, and copy the file when it is whole."
        )
    return Path(output).expanduser()


class Place(tuple):
    """(file, first byte, bytes) of a whole row."""

    __slots__ = ()


class AnswerFiles:
    """The files of one output. All processes make the same calls in the same order: opened, append…, finish.

    Between the entry and the end of opened() each process holds a lock on its own file, and the first process one on
    every file that is none of this run's, so that no other run changes them meanwhile.
    """

    def __init__(self, output: Path, ids: Sequence[str], made_with: Mapping[str, Any], share: Share = ALONE):
        self.output = output
        self.ids = ids
        self.made_with = dict(made_with)
        self.share = share
        self.meta = output.with_name(output.name + ".meta.json")
        self.part = self._part(share.index)

    def is_finished(self) -> bool:
        """Whether the output holds every row in order already, made with the same settings; changes nothing."""
        if self.parts() or not self.output.is_file() or not self.output.stat().st_size:
            return False
        self.check_settings()
        return not torn_bytes(self.output) and list(read_places([self.output])) == list(self.ids)

    @contextlib.contextmanager
    def opened(self) -> Iterator[set[str]]:
        """Locks the files, gets them ready and gives the ids of the rows that are there."""
        with contextlib.ExitStack() as locks:
            try:
                self._prepare(locks)
            except OSError as error:
                raise unwritable(f"--output={self.output}", error) from error
            self.share.barrier("regenerate-open")
            yield set(read_places(self.files()))

    def _prepare(self, locks: contextlib.ExitStack) -> None:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        started = any(file.stat().st_size for file in self.files())
        if started:
            self.check_settings()
        locks.enter_context(locked(self.part))  # before a byte changes: another run may be writing
        self.share.barrier("regenerate-seen")  # nothing changes before every process has looked
        if self.share.index:
            return
        ours = [self._part(index).name for index in range(self.share.count)]
        for file in self.files():
            if file.name not in ours:
                locks.enter_context(locked(file))
        for file in self.files():
            cut_torn_line(file)
        if not started:
            write_whole(self.meta, json.dumps(self.made_with, indent=2) + "\n")

    def _part(self, index: int) -> Path:
        if self.share.count == 1:
            return self.output
        return self.output.with_name(f"{self.output.name}.part-{index}-of-{self.share.count}.jsonl")

    @contextlib.contextmanager
    def appending(self) -> Iterator[Callable[[Sequence[Mapping[str, Any]]], None]]:
        """A function that adds rows to this process' file and returns when they are on the disk."""
        with self.part.open("ab") as file:

            def append(rows: Sequence[Mapping[str, Any]]) -> None:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
                file.flush()
                os.fsync(file.fileno())

            yield append

    def finish(self) -> None:
        """Waits for all processes' rows and makes OUTPUT of them, in the order of the prompts."""
        self.share.barrier("regenerate-answered")
        if self.share.index == 0:
            self.merge()
        self.share.barrier("regenerate-merged")

    def merge(self) -> None:
        places = read_places(self.files())
        missing = [name for name in self.ids if name not in places]
        if missing:
            raise DataError(
                f"{self.output}: {len(missing)} of {len(self.ids)} rows are in none of its parts, {missing[0]} for one."
                "\nAll processes have to see the same folder; give an --output that they share, and run it again."
            )
        parts = self.parts()
        if parts or list(places) != list(self.ids):
            with replacing(self.output) as fresh:
                copy_rows(fresh, [places[name] for name in self.ids])
            sync_folder(self.output.parent)  # the rows have their new name for good before the old ones go
        for part in parts:
            part.unlink()

    def parts(self) -> list[Path]:
        """The part files of this output, of any number of processes."""
        name = re.compile(re.escape(self.output.name) + r"\.part-\d+-of-\d+\.jsonl")
        if not self.output.parent.is_dir():
            return []
        return sorted(path for path in self.output.parent.iterdir() if name.fullmatch(path.name))

    def files(self) -> list[Path]:
        """The output, when it exists, and its parts."""
        return [*([self.output] if self.output.exists() else []), *self.parts()]

    def check_settings(self) -> None:
        """Refuses to add to rows that were made with something else."""
        if not self.meta.is_file():
            raise DominoError(
                f"{self.output} exists, but {self.meta.name} beside it does not: it is not known what the rows were "
                "made with.\nChoose another output, or remove the file to answer all prompts again."
            )
        try:
            was = json.loads(self.meta.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.meta} is no JSON ({error}); remove it and the rows beside it to start again."
            ) from error
        if not isinstance(was, dict):
            raise DataError(
                f"{self.meta} holds a {type(was).__name__}; remove it and the rows beside it to start again."
            )
        now = self.made_with
        keys = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
        if keys:
            lines = [f"  {key}: {str(was.get(key))[:40]} there, {str(now.get(key))[:40]} now" for key in keys][:3]
            raise DominoError(
                "\n".join(
                    [f"{self.output} was made with something else:", *lines, "Set it back or choose another output."]
                )
            )


@contextlib.contextmanager
def locked(path: Path, message: str | None = None) -> Iterator[None]:
    """Holds the lock of a file, made when there is none and removed when it stays empty.

    A DominoError, with this message, while another process holds it. On a file system without locks nothing is held.
    """
    message = message or f"another process is writing {path}; wait for it, or choose another --output."
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DominoError(message) from None
        except OSError:
            pass
        else:
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                raise DominoError(message)  # whoever held the lock has just merged the files
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # merged: it is gone
                if not path.stat().st_size:
                    path.unlink()


def read_places(files: Collection[Path]) -> dict[str, Place]:
    """Id → place of every row, in the order of the files; of an id in two files the first counts.

    That one row is in two files happens when a merge was cut short behind its renaming; within a file it is an error.
    """
    places: dict[str, Place] = {}
    for path in files:
        seen: set[str] = set()
        for number, start, line in whole_lines(path):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: the line is no JSON object ({error}). Remove it.") from error
            name = row["id"] if isinstance(row, dict) and "id" in row else None
            if name in seen or not isinstance(name, str):
                raise DataError(f"{path}:{number}: the id {name!r} is missing or there twice; remove the line.")
            seen.add(name)
            places.setdefault(name, Place((path, start, len(line))))
    return places


def whole_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, first byte, line with its end) of every line that is not blank."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, start, line
            start += len(line)


def copy_rows(path: Path, places: Sequence[Place]) -> None:
    """Writes the rows of `places` into a new file, in their order."""
    with contextlib.ExitStack() as stack:
        sources = {source: stack.enter_context(source.open("rb")) for source in {place[0] for place in places}}
        out = stack.enter_context(path.open("wb"))
        for source, start, size in places:
            sources[source].seek(start)
            out.write(sources[source].read(size))
        out.flush()
        os.fsync(out.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def cut_torn_line(path: Path) -> None:
    """Ends the file behind its last line end: what follows was being written when the process died."""
    torn = torn_bytes(path)
    if torn:
        with path.open("rb+") as file:
            file.truncate(path.stat().st_size - torn)


def torn_bytes(path: Path) -> int:
    """How many bytes stand behind the file's last line end."""
    with path.open("rb") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65_536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return size - (start + newline + 1)
            end = start
    return size
