"""The files of a decoding run: what was generated is on disk at once, and an interrupted run continues.

generations.jsonl  a row for each prompt, turn and mode, written when its group of prompts is done.
progress.jsonl     first what the run is made with, then a line for each group: its times, what was compared, and the
                   size of generations.jsonl after it.

answers.jsonl      at the end one row for each prompt, in the form of `regenerate`.

A group counts once its line here is whole. What follows the last whole group was cut off and is removed when the run
continues.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import parse_row, read_jsonl
from domino_jax.decoding.acceptance import acceptance_record
from domino_jax.decoding.conversations import AnsweredPrompt, output_row
from domino_jax.decoding.generate import Generation
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.runtime.differences import differences, refuse
from domino_jax.runtime.files import replacing
from domino_jax.runtime.journal import Journal, locked, whole_lines

GENERATIONS = "generations.jsonl"
ANSWERS = "answers.jsonl"
PROGRESS = "progress.jsonl"


class RunFiles:
    """Appends groups to the two files of `folder` and reads the groups of earlier starts; a context manager.

    Args:
        run: what the run is made with, by section; a folder begun with something else is refused.
        restart: start from scratch instead of refusing.
    """

    def __init__(self, folder: Path, run: Mapping[str, Mapping[str, Any] | None], restart: bool = False):
        self.folder = folder
        with contextlib.ExitStack() as files:
            folder.mkdir(parents=True, exist_ok=True)
            files.enter_context(locked(folder / PROGRESS))  # before a byte changes: another run may be writing
            self._generations = files.enter_context(Journal(folder / GENERATIONS))
            self._progress = files.enter_context(Journal(folder / PROGRESS))
            self._begin(json.loads(json.dumps(run)), restart)
            self._files = files.pop_all()

    def _begin(self, run: Mapping[str, Any], restart: bool) -> None:
        """Takes over the whole groups of earlier starts and removes what follows them, in both files."""
        self.records: list[dict[str, Any]] = []
        path = self.folder / PROGRESS
        lines = [(parse_row(line.text, f"{path}:{line.number}"), line.end) for line in whole_lines(path)]
        before = lines[0][0].get("run", {}) if lines else None
        if before is None or (restart and before != run):
            self._progress.truncate(0)
            self._generations.truncate(0)
            self._progress.append({"run": run})
            return
        (_, end), *groups = lines
        refuse_other_run(self.folder, before, run)
        there, size = (self.folder / GENERATIONS).stat().st_size, 0
        for record, after in groups:
            if record["bytes"] > there:
                break  # the rows of this group never reached the disk
            self.records.append(record)
            end, size = after, record["bytes"]
        self._progress.truncate(end)
        self._generations.truncate(size)

    def replay(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """(record, rows of generations.jsonl) of every group of earlier starts, one group in memory at a time."""
        with (self.folder / GENERATIONS).open("rb") as file:
            for record in self.records:
                lines = file.read(record["bytes"] - file.tell()).splitlines()
                yield record, [json.loads(line) for line in lines]

    def append(self, record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a group's rows, then its record with the size of the file of rows."""
        size = self._generations.append(*rows)
        self._progress.append({**record, "bytes": size})

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, *exception) -> None:
        self._files.close()


def generation_row(name: str, mode: str, answer: Generation, text: str | None) -> dict[str, Any]:
    """A row of generations.jsonl."""
    return {
        "id": name,
        "mode": mode,
        "token_ids": answer.token_ids,
        "text": text,
        "accept_lengths": answer.accept_lengths,
        "finish_reason": answer.finish_reason,
        "acceptance": acceptance_record(Counter(answer.accept_lengths), answer.drafts),
    }


def read_generation(row: Mapping[str, Any]) -> Generation:
    """The answer of a row of generations.jsonl."""
    drafts = row["acceptance"]["num_draft_tokens"] if row["acceptance"] else 0
    return Generation(row["token_ids"], row["accept_lengths"], row["finish_reason"], drafts)


def write_answers(folder: Path, prompts: Sequence[Prompt], codec: TextCodec, settings: DecodeSettings) -> None:
    """Writes the first turns' answers, which are the target's own in every mode, as rows of `regenerate`."""
    waiting = {prompt.answer_id: prompt for prompt in prompts}
    with replacing(folder / ANSWERS) as fresh, fresh.open("w", encoding="utf-8") as answers:
        for _, row in read_jsonl(folder / GENERATIONS):
            if row["id"] in waiting:
                answered = AnsweredPrompt(waiting.pop(row["id"]), read_generation(row))
                answers.write(json.dumps(output_row(answered, codec, settings), ensure_ascii=False) + "\n")


def refuse_other_run(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses a folder whose decoding was made with something else than `now`; the same model may have another path."""
    differing = differences(before, now)
    for model in ("target", "drafter"):
        if not any(key.startswith(f"{model}.") and key != f"{model}.path" for key in differing):
            differing.pop(f"{model}.path", None)
    refuse(differing, f"{folder} holds a decoding of something else:", "Choose another --output.")
