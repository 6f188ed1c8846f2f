"""The files of a decoding run in the making: what was generated is on disk at once, and an interrupted run goes on.

generations.jsonl  a row for each prompt, turn and mode, written when its group of prompts is done.
progress.jsonl     first what the run is made with, then a line for each group: its times, what was compared, and where
                   generations.jsonl ended behind it. Each start of the command (a sitting) adds its date.

A group counts once its line here is whole. What stands behind the last whole group was cut off in the middle and is
dropped when the run goes on.
"""

import contextlib
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.data.answer_files import locked
from domino_jax.decoding.generate import Generation
from domino_jax.runtime.errors import DominoError, unwritable

GENERATIONS = "generations.jsonl"
PROGRESS = "progress.jsonl"
SHOWN = 3  # lines of a refusal: with the first and the last it has five


class RunFiles:
    """Appends groups to the two files of `folder` and reads back those that were there before.

    Args:
        folder: made when it is not there.
        run: what the run is made with, by section; a folder begun with something else is refused.
        anew: instead of refusing it, drop what is there and begin anew.

    with RunFiles(folder, run) as files:
        for record, rows in files.replay(): ...
        files.append(record, rows)
    """

    def __init__(self, folder: Path, run: Mapping[str, Mapping[str, Any] | None], anew: bool = False):
        self.folder = folder
        with contextlib.ExitStack() as files:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                files.enter_context(locked(folder / PROGRESS))  # before a byte changes: another run may be writing
                self._generations = files.enter_context((folder / GENERATIONS).open("ab"))
                self._progress = files.enter_context((folder / PROGRESS).open("ab"))
                self._begin(run, anew)
            except OSError as error:
                raise unwritable(f"--output={folder}", error) from error
            self._files = files.pop_all()

    def _begin(self, run: Mapping[str, Mapping[str, Any] | None], anew: bool) -> None:
        self.sittings, self.records = 0, []
        run = json.loads(json.dumps(run))
        if anew and not self._begun_with(run):
            self._progress.truncate(0)
        self._cut(run)
        self.sittings += 1
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._write_progress({"sitting": self.sittings, "date": date, **({"run": run} if self.sittings == 1 else {})})

    def _cut(self, run: Mapping[str, Any]) -> None:
        """Takes up the whole groups of earlier sittings and drops what stands behind them, in both files."""
        there = (self.folder / GENERATIONS).stat().st_size
        kept = groups_end = 0
        for line, end in _whole_lines(self.folder / PROGRESS):
            if "bytes" not in line:
                if "run" in line:
                    refuse_other_run(self.folder, "an unfinished decoding", line["run"], run)
                self.sittings += 1
            elif self.sittings == 0 or line["bytes"] > there:
                break  # not begun by this command, or the rows of this group never reached the disk
            else:
                self.records.append(line)
                groups_end = line["bytes"]
            kept = end
        self._progress.truncate(kept)
        self._generations.truncate(groups_end)

    def _begun_with(self, run: Mapping[str, Any]) -> bool:
        first = next(_whole_lines(self.folder / PROGRESS), None)
        return first is not None and "run" in first[0] and first[0]["run"] == run

    def replay(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """(record, rows of generations.jsonl) of every group of earlier sittings, one group in memory at a time."""
        with (self.folder / GENERATIONS).open("rb") as file:
            for record in self.records:
                lines = file.read(record["bytes"] - file.tell()).splitlines()
                yield record, [json.loads(line) for line in lines]

    def append(self, record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a group's rows, then its record with the place where they end."""
        self._generations.write(b"".join(_line(row) for row in rows))
        self._generations.flush()
        self._write_progress({**record, "sitting": self.sittings, "bytes": self._generations.tell()})

    def _write_progress(self, line: Mapping[str, Any]) -> None:
        self._progress.write(_line(line))
        self._progress.flush()

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, *exception) -> None:
        self._files.close()


def generation_row(
    name: str, mode: str, answer: Generation, text: str | None, drafter: str | None = None
) -> dict[str, Any]:
    """A row of generations.jsonl; `drafter` only where several are compared."""
    return {
        "id": name,
        "mode": mode,
        **({"drafter": drafter} if drafter else {}),
        "token_ids": answer.token_ids,
        "text": text,
        "accept_lengths": answer.accept_lengths,
        "finish_reason": answer.finish_reason,
    }


def read_generation(row: Mapping[str, Any]) -> Generation:
    """The answer of a row of generations.jsonl."""
    return Generation(row["token_ids"], row["accept_lengths"], row["finish_reason"])


def refuse_other_run(folder: Path, what: str, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """A folder answers only for what it was made with; something else asked of it is a mistake.

    Sections of `wanted` are compared with those of `there` key by key, as far as both know the keys: `what` names the
    content in the message.
    """
    differing = []
    for part, values in wanted.items():
        differing += _differences(part, there.get(part) or {}, values or {})
    if differing:
        more = [f"  and {len(differing) - SHOWN + 1} more"] * (len(differing) > SHOWN)
        shown = [*differing[: SHOWN - 1 if more else SHOWN], *more]
        raise DominoError("\n".join([f"{folder} holds {what} of something else:", *shown, "Choose another --output."]))


def _differences(part: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = []
    for key in [key for key in new if key in old] if old else new:
        if isinstance(old.get(key), dict) and isinstance(new[key], dict):
            found += _differences(f"{part}.{key}", old[key], new[key])
        elif old.get(key) != new[key]:
            found.append(f"  {part}.{key}: {old.get(key)!r} there, {new[key]!r} now")
    return found


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode()


def _is_progress(value: Any) -> bool:
    """Whether it is a line that RunFiles writes; all of them name their sitting."""
    if not isinstance(value, dict) or "sitting" not in value:
        return False
    kinds = {"run": dict, "bytes": int}
    return all(isinstance(value[name], kind) for name, kind in kinds.items() if name in value)


def _whole_lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """(object, end in bytes) of each line from the start, up to the first that is torn."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not line.endswith(b"\n") or not _is_progress(value):
                return
            end += len(line)
            yield value, end
