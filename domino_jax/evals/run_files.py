"""The files of a decoding run: what was generated is on disk at once, and an interrupted run continues.

progress.jsonl     first what the run is made with, then a line for each group of prompts that is done, with its rows.
generations.jsonl  the rows of these groups, one for each prompt, turn and mode; a run that continues writes them again.
answers.jsonl      at the end one row for each prompt, in the form of `regenerate`.

A group counts once its line in progress.jsonl is whole.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import parse_row, read_jsonl
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
        run: what the run is made with, as JSON values by section; a folder begun with something else is refused.
        restart: start from scratch instead of refusing.
    """

    def __init__(self, folder: Path, run: Mapping[str, Mapping[str, Any]], restart: bool = False):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as files:
            files.enter_context(locked(folder / PROGRESS))  # before a byte changes: another run may be writing
            self._progress = files.enter_context(Journal(folder / PROGRESS))
            begun = list(itertools.islice(self._lines(), 1))
            changes = differences(begun[0].get("run", {}), run) if begun else {}
            if not restart:
                refuse(changes, f"{folder} holds a decoding of something else:", "Choose another --output.")
            if changes or not begun:
                self._progress.clear()
                self._progress.append({"run": run})
            self._generations = files.enter_context(Journal(folder / GENERATIONS))
            self._files = files.pop_all()
        self.done = sum(1 for _ in whole_lines(folder / PROGRESS)) - 1  # groups of earlier starts

    def _lines(self) -> Iterator[dict[str, Any]]:
        path = self.folder / PROGRESS
        yield from (parse_row(line.text, f"{path}:{line.number}") for line in whole_lines(path))

    def replay(self) -> Iterator[dict[str, Any]]:
        """Every group of earlier starts, one in memory at a time; their rows are written again."""
        self._generations.clear()
        for group in itertools.islice(self._lines(), 1, 1 + self.done):
            self._generations.append(*group["rows"])
            yield group

    def append(self, group: Mapping[str, Any]) -> None:
        self._progress.append(group)
        self._generations.append(*group["rows"])

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, *exception) -> None:
        self._files.close()


def write_answers(folder: Path, prompts: Sequence[Prompt], codec: TextCodec, settings: DecodeSettings) -> None:
    """Writes the first turns' answers, which are the target's own in every mode, as rows of `regenerate`."""
    waiting = {prompt.answer_id: prompt for prompt in prompts}
    with replacing(folder / ANSWERS) as fresh, fresh.open("w", encoding="utf-8") as answers:
        for _, row in read_jsonl(folder / GENERATIONS):
            if row["id"] in waiting:
                answer = Generation(row["token_ids"], row["accept_lengths"], row["finish_reason"])
                answered = AnsweredPrompt(waiting.pop(row["id"]), answer)
                answers.write(json.dumps(output_row(answered, codec, settings), ensure_ascii=False) + "\n")
