"""Training rows by number: which are usable, their length and place, and their tokens on demand."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from domino_jax.data.chat import TrainingRow, generation_prompts, training_rows
from domino_jax.data.held_out import SHORTEST, beginning_hashes, hold_out, prompt_hash, prompt_of
from domino_jax.data.messages import present
from domino_jax.data.prompts import parse_row
from domino_jax.data.sources import DataFile
from domino_jax.runtime.errors import DataError

SHOWN_CHARACTERS = 600  # of one piece of a row in a text for people


@dataclasses.dataclass(frozen=True)
class RowEncoder:
    """One line of JSON to its TrainingRows (chat.training_rows), each of at most max_length tokens.

    Ids of vocab_size or more are refused.
    """

    tokenizer: Any
    max_length: int
    thinking: bool
    vocab_size: int | None

    def __call__(self, line: bytes, where: str) -> list[TrainingRow]:
        return [self._cut(make(), where) for make in self._rows(line, where)]

    def part(self, line: bytes, where: str, number: int) -> TrainingRow:
        """The row of that number alone, from 0."""
        rows = self._rows(line, where)
        if number >= len(rows):
            raise DataError(f"{where}: the line no longer has {number + 1} answers; data must not change under a run.")
        return self._cut(rows[number](), where)

    def asked(self, row: TrainingRow) -> np.ndarray:
        """The prompt of a row's first answer, int32 [P], as decoding asks it: with the think block that a template
        drops from earlier turns. An answer that begins with its thoughts was asked without the block."""
        end = prompt_of(row.loss_mask)
        prompt, answer = row.token_ids[:end], row.token_ids[end:]
        if self.tokenizer is None or self.thinking:
            return prompt
        earlier, asked = generation_prompts(self.tokenizer)
        block = asked[len(earlier) :]
        if prompt[-len(asked) :].tolist() == asked or prompt[-len(earlier) :].tolist() != earlier:
            return prompt
        if answer[:1].tolist() == block[:1]:
            return prompt
        return np.concatenate([prompt[: -len(earlier)], np.asarray(asked, prompt.dtype)])

    def _rows(self, line: bytes, where: str) -> list[Callable[[], TrainingRow]]:
        return training_rows(self.tokenizer, present(parse_row(line, where)), self.thinking, where)

    def _cut(self, row: TrainingRow, where: str) -> TrainingRow:
        # A gather would silently clamp an id past the embedding.
        if self.vocab_size is not None and (largest := row.token_ids.max(initial=0)) >= self.vocab_size:
            raise DataError(f"{where}: token id {largest} is outside the target's {self.vocab_size} embedding rows.")
        return TrainingRow(row.token_ids[: self.max_length], row.loss_mask[: self.max_length])


def has_anchor(loss_mask: np.ndarray) -> bool:
    """True if two neighbouring tokens are supervised: an anchor and its first label."""
    return bool(np.any((loss_mask[:-1] > 0.5) & (loss_mask[1:] > 0.5)))


def mark_answers(row: TrainingRow, tokenizer: Any) -> str:
    """The row's text with supervised parts as [[…]], long ones without their middle; ids without a tokenizer."""
    edges = np.flatnonzero(np.diff(row.loss_mask > 0.5)) + 1
    pieces = []
    for ids, mask in zip(np.split(row.token_ids, edges), np.split(row.loss_mask, edges), strict=True):
        text = str(ids.tolist()) if tokenizer is None else tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        if len(text) > SHOWN_CHARACTERS:
            text = f"{text[: SHOWN_CHARACTERS // 2]} … {text[-SHOWN_CHARACTERS // 2 :]}"
        pieces.append(f"[[{text}]]" if mask[0] > 0.5 else text)
    return "".join(pieces)


def read_span(file: DataFile, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file."""
    try:
        # Opened for each read: threads share nothing, and a glob may name more files than may be open at once.
        with open(file.local, "rb", buffering=0) as data:
            data.seek(start)
            return data.read(end - start)
    except OSError as error:
        raise DataError(f"{file.name}: cannot be read ({error}). Was it changed since the run began?") from error


# One row of the data. start, end: the bytes of its line (`read_span`), whose number is `line`, from 1.  part: which of
# the line's rows it is, from 0.  length, supervised: tokens after truncation.  usable: it has an anchor.  prompt: of a
# line's first row the tokens before the first supervised one, of its other rows 0.  prompt_hash: held_out.prompt_hash,
# for all rows of a line that of the first.  asked_hash: the same of RowEncoder.asked.
ROW = np.dtype(
    [
        *((name, np.int64) for name in ("start", "end", "line")),
        *((name, np.int32) for name in ("part", "length", "supervised")),
        *(("usable", bool), ("prompt", np.int32), ("prompt_hash", np.int64), ("asked_hash", np.int64)),
    ]
)


@dataclasses.dataclass(frozen=True)
class Index:
    """Facts about all N rows of F files, as arrays: millions of rows take some tens of megabytes.

    counts int64 [F]: rows of each file.  rows ROW [N].  bad int64 []: further rows, which are left out.
    tokens int32 [I], first_rows int64 [I]: those of rows with an anchor, each once, and the first row with each.
    """

    counts: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    first_rows: np.ndarray
    bad: np.ndarray


class TrainingRows:
    """The usable rows of all files as a sequence, encoded on access.

    A row is usable if it has an anchor and is not held out. That is decided before shuffling, so an epoch is every
    usable row exactly once. A row's id is its number over all files in order.

    held_out: prompts to leave out of training (held_out.hold_out), each at most half of max_length long.
    held_out_before: prompt rows to leave out in their place, if there are some.
    """

    def __init__(
        self,
        files: Sequence[DataFile],
        index: Index,
        encoder: RowEncoder,
        held_out: int = 0,
        held_out_before: Sequence[Mapping[str, Any]] = (),
    ):
        rows, count = index.rows, 0 if held_out_before else held_out
        left_out, self._held_out = hold_out(
            rows["prompt"], rows["asked_hash"], rows["usable"], count, encoder.max_length // 2
        )
        self._held_out_before = list(held_out_before)
        hashes = [prompt_hash(np.asarray(row["token_ids"], np.int32)) for row in held_out_before]
        self._files, self._index, self._rows, self._encoder = files, index, rows, encoder
        left_out |= rows["usable"] & self._has_prompt(hashes)
        self._starts = np.concatenate([[0], np.cumsum(index.counts)])
        self.lengths = rows["length"]
        self.usable = np.flatnonzero(rows["usable"] & ~left_out)  # ids, int64
        self.num_read = len(rows)
        self.num_bad = int(index.bad)  # further rows, which cannot be used and are left out
        self.num_held_out_prompts = len(self._held_out) or len(held_out_before)
        self.num_held_out = int(left_out.sum())  # rows with these prompts
        self.num_skipped = self.num_read - self.num_held_out - len(self)  # without an anchor
        self.num_evaluated = 0  # of count_evaluated

    def count_evaluated(self, prompts: Iterable[Sequence[int]]) -> int:
        """Counts usable rows whose prompts evaluate the drafter all the same, given by their token ids.

        A row's prompt ends where its first answer begins, so a prompt of several turns begins with that of a row that
        has the same conversation.
        """
        lengths = np.unique(self._rows["prompt"][self.usable])
        lengths, hashes = lengths[lengths >= SHORTEST], set()
        for ids in map(np.asarray, prompts):
            hashes |= {prompt_hash(ids), *beginning_hashes(ids, lengths)}
        self.num_evaluated = int(self._has_prompt(list(hashes))[self.usable].sum())
        return self.num_evaluated

    def _has_prompt(self, hashes: Sequence[int]) -> np.ndarray:
        """bool [N], whether a hash is that of the row's prompt, or of the prompt that decoding asks in its place."""
        return np.isin(self._rows["prompt_hash"], hashes) | np.isin(self._rows["asked_hash"], hashes)

    def first_with(self, token: int) -> int | None:
        """The id of the first row with an anchor that has a token."""
        return next(iter(self._index.first_rows[self._index.tokens == token].tolist()), None)

    def counts(self) -> dict[str, int]:
        """The counts of preflight.json and model cards; tokens of the usable rows, after truncation."""
        return {
            "rows": len(self),
            "rows_read": self.num_read,
            "rows_without_anchor": self.num_skipped,
            "rows_left_out": self.num_bad,
            "rows_with_evaluated_prompts": self.num_evaluated,
            "tokens": int(self.lengths[self.usable].sum(dtype=np.int64)),
            "supervised_tokens": int(self._rows["supervised"][self.usable].sum(dtype=np.int64)),
        }

    def held_out_prompts(self) -> list[dict[str, Any]]:
        """A prompt row {"id": file:line of its first row, "token_ids"} for every held-out prompt."""
        if self._held_out_before:
            return self._held_out_before
        rows = self._held_out.tolist()
        return [{"id": self.where(row), "token_ids": self._encoder.asked(self.read(row)).tolist()} for row in rows]

    def __len__(self) -> int:
        return len(self.usable)

    def __getitem__(self, index: int) -> tuple[int, TrainingRow]:
        """The id of usable row `index` and the row."""
        row_id = int(self.usable[index])
        return row_id, self.read(row_id)

    def where(self, row_id: int) -> str:
        """file:line of a row."""
        return f"{self._file(row_id).name}:{self._rows['line'][row_id]}"

    def _file(self, row_id: int) -> DataFile:
        return self._files[int(np.searchsorted(self._starts, row_id, side="right")) - 1]

    def read(self, row_id: int) -> TrainingRow:
        """The row of that id."""
        where, start, end, _, part, length, *_ = self.where(row_id), *self._rows[row_id].item()
        row = self._encoder.part(read_span(self._file(row_id), start, end), where, part)
        if len(row.token_ids) != length:
            raise DataError(
                f"{where}: the row has {len(row.token_ids)} tokens, and {length} when the run began; "
                "data must not change under a run."
            )
        return row
