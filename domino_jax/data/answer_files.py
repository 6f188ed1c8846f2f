"""The files of a regeneration: rows appended as they are answered, and at the end one file in the prompts' order.

OUTPUT                       the rows; a process that answers alone appends to this file
OUTPUT.part-<i>-of-<n>.jsonl the rows that process i of n has answered so far
OUTPUT.meta.json             what the rows were made with; other settings are refused

A row counts once its line is whole. Rows that are whole in any of the files are not answered again, no matter when a
process died and how many processes continue. The merged file replaces OUTPUT in one step before a part is removed.
"""

import contextlib
import dataclasses
import glob
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from domino_jax.data.prompts import parse_row
from domino_jax.runtime.differences import differences, refuse
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.files import is_remote, replacing
from domino_jax.runtime.journal import locked, whole_lines
from domino_jax.runtime.json_files import read_json, write_json


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes that share the work, and which of them this is.

    barrier(name): returns when all processes have reached it.
    """

    index: int = 0
    count: int = 1
    barrier: Callable[[str], None] = lambda name: None


ALONE = ProcessGroup()


def local_output(output: str | os.PathLike) -> Path:
    """The path of an output that rows can be appended to."""
    if is_remote(output):
        raise DominoError(
            f"{output}: rows are appended as they are answered, which no object store can do.\n"
            "Write to a folder that all processes share, and copy the file when it is whole."
        )
    return Path(output).expanduser()


class RowBytes(NamedTuple):
    """Where a whole row is stored."""

    file: Path
    start: int
    size: int


class AnswerFiles:
    """The files of one output. All processes make the same calls in the same order: opened, then finish.

    While opened() runs, each process holds a lock on its file, and the first process also on every file that is not
    this run's, so that no other run changes them.
    """

    def __init__(self, output: Path, ids: Sequence[str], origin: Mapping[str, Any], processes: ProcessGroup = ALONE):
        """ids: of the rows, in order.  origin: JSON values that decide the answers."""
        self.output = output
        self.ids = ids
        self.origin = dict(origin)
        self.processes = processes
        self.meta = output.with_name(output.name + ".meta.json")
        self.part = self._part(processes.index)  # the file of this process

    def is_finished(self) -> bool:
        """Whether the output holds every row in order already, of the same origin; changes nothing."""
        if self.files() != [self.output] or not self.output.stat().st_size:
            return False
        self.check_origin()
        return list(find_rows([self.output])) == list(self.ids)

    @contextlib.contextmanager
    def opened(self) -> Iterator[set[str]]:
        """Locks and prepares the files and gives the ids of the rows that they hold."""
        with contextlib.ExitStack() as locks:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            started = any(file.stat().st_size for file in self.files())
            if started:
                self.check_origin()
            locks.enter_context(locked(self.part))  # before a byte changes: another run may be writing
            self.processes.barrier("regenerate-seen")  # nothing changes before every process has looked
            if self.processes.index == 0:
                ours = [self._part(index) for index in range(self.processes.count)]
                for file in set(self.files()).difference(ours):
                    locks.enter_context(locked(file))
                if not started:
                    write_json(self.meta, self.origin)
            self.processes.barrier("regenerate-open")
            yield set(find_rows(self.files()))

    def _part(self, index: int) -> Path:
        if self.processes.count == 1:
            return self.output
        return self.output.with_name(f"{self.output.name}.part-{index}-of-{self.processes.count}.jsonl")

    def finish(self) -> None:
        """Waits for all processes' rows and makes OUTPUT of them, in the order of the prompts."""
        self.processes.barrier("regenerate-answered")
        if self.processes.index == 0:
            self.merge()
        self.processes.barrier("regenerate-merged")

    def merge(self) -> None:
        files = self.files()
        rows = find_rows(files)
        missing = [name for name in self.ids if name not in rows]
        if missing:
            raise DataError(
                f"{self.output}: {len(missing)} of {len(self.ids)} rows are in none of its parts, {missing[0]} for one."
                "\nAll processes have to see the same folder; give an --output that they share, and run it again."
            )
        if list(rows) != list(self.ids) or files != [self.output]:
            with replacing(self.output) as fresh:
                copy_rows(fresh, [rows[name] for name in self.ids])
        for file in files:
            if file != self.output:
                file.unlink()

    def files(self) -> list[Path]:
        """The output, when it exists, and its parts, of any number of processes."""
        parts = self.output.parent.glob(f"{glob.escape(self.output.name)}.part-*-of-*.jsonl")
        return [*([self.output] if self.output.exists() else []), *sorted(parts)]

    def check_origin(self) -> None:
        """Refuses to add to rows of another origin."""
        try:
            before = read_json(self.meta)
        except DataError as error:
            raise DominoError(
                f"{self.output} exists, but {self.meta.name} beside it does not or is damaged: it is not known what "
                "the rows were made with.\nChoose another output."
            ) from error
        heading = f"{self.output} was made with something else:"
        refuse(differences(before, self.origin), heading, "Set it back or choose another output.")


def find_rows(files: Collection[Path]) -> dict[str, RowBytes]:
    """Id → place of every row, in the order of the files.

    Two files hold one row when a merge was killed after its renaming: the first counts. Within a file it is an error.
    """
    rows: dict[str, RowBytes] = {}
    for path in files:
        seen: set[str] = set()
        for line in whole_lines(path):
            name = parse_row(line.text, f"{path}:{line.number}").get("id")
            if name in seen or not isinstance(name, str):
                raise DataError(f"{path}:{line.number}: the id {name!r} is missing or there twice; remove the line.")
            seen.add(name)
            rows.setdefault(name, RowBytes(path, line.start, len(line.text)))
    return rows


def copy_rows(path: Path, rows: Sequence[RowBytes]) -> None:
    """Writes rows into a new file, in this order."""
    with contextlib.ExitStack() as stack:
        sources = {source: stack.enter_context(source.open("rb")) for source in {row.file for row in rows}}
        out = stack.enter_context(path.open("wb"))
        for row in rows:
            sources[row.file].seek(row.start)
            out.write(sources[row.file].read(row.size))
        out.flush()
        os.fsync(out.fileno())
