"""Training rows to endless batches of a fixed shape, in an order that the seed decides and any start can take up."""

import pathlib
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from domino_jax.data.chat import Row, encode_training_row
from domino_jax.data.prompts import read_jsonl
from domino_jax.errors import DataError


class TrainingRows:
    """The usable rows of a file, encoded and cut to max_length; a random-access source for Grain.

    Usable are rows with two supervised tokens in a row, an anchor and its first label (CONTRACT §2.1). They are
    filtered here, before any shuffling, so that an epoch is every usable row exactly once. All tokens lie in one array:
    no Python object per token.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        tokenizer: Any,
        *,
        max_length: int,
        thinking: bool,
        vocab_size: int | None = None,
    ):
        tokens, masks, row_ids = [], [], []
        self.num_read = 0
        for number, row in read_jsonl(path):
            encoded = encode_training_row(tokenizer, row, thinking, where=f"{path}:{number}")
            # A gather clamps an id past the embedding without a word.
            if vocab_size is not None and (largest := encoded.token_ids.max(initial=0)) >= vocab_size:
                raise DataError(
                    f"{path}:{number}: token id {largest} is outside the target's {vocab_size} embedding rows."
                )
            token_ids, loss_mask = encoded.token_ids[:max_length], encoded.loss_mask[:max_length]
            if has_anchor(loss_mask):
                tokens.append(token_ids)
                masks.append(loss_mask.astype(np.uint8))
                row_ids.append(self.num_read)
            self.num_read += 1
        if not tokens:
            raise DataError(
                f"{path}: none of its {self.num_read} rows has two supervised tokens in a row within "
                f"data.max_length {max_length}.\n"
                "Train on rows with answers; prompts alone are answered first with config.data.regenerate=True."
            )
        self._ends = np.cumsum([len(entry) for entry in tokens])
        self._tokens = np.concatenate(tokens)
        self._masks = np.concatenate(masks)
        self._row_ids = np.asarray(row_ids, np.int32)

    @property
    def num_skipped(self) -> int:
        """Rows of the file that have no anchor."""
        return self.num_read - len(self)

    def __len__(self) -> int:
        return len(self._row_ids)

    def __getitem__(self, index: int) -> tuple[int, Row]:
        """The row's place in the file (from 0, blank lines not counted) and the row."""
        start = self._ends[index - 1] if index else 0
        span = slice(start, self._ends[index])
        return int(self._row_ids[index]), Row(self._tokens[span], self._masks[span].astype(np.float32))


def has_anchor(loss_mask: np.ndarray) -> bool:
    """True when two neighbouring tokens are supervised."""
    return bool(np.any((loss_mask[:-1] > 0.5) & (loss_mask[1:] > 0.5)))


def pad_row(numbered: tuple[int, Row], max_length: int) -> dict[str, np.ndarray]:
    """One row at the right-padded length: tokens int32 [S], loss_mask float32 [S], row_ids int32 []."""
    row_id, row = numbered
    room = (0, max_length - len(row.token_ids))
    # Padding needs no token of its own: it is unsupervised and behind everything that may attend to it.
    return {
        "tokens": np.pad(row.token_ids, room),
        "loss_mask": np.pad(row.loss_mask, room),
        "row_ids": np.asarray(row_id, np.int32),
    }


def make_dataset(
    path: str | pathlib.Path,
    tokenizer: Any,
    *,
    max_length: int,
    batch_size: int,
    seed: int,
    thinking: bool,
    vocab_size: int | None = None,
    report: Callable[[str], None] = print,
) -> grain.IterDataset:
    """Batches of dict(tokens int32 [B, S], loss_mask float32 [B, S], row_ids int32 [B]), S = max_length, without end.

    Every epoch has its own order. With vocab_size, the rows of the target's embedding, ids past it are refused. The
    iterator's get_state() is a small JSON value; set_state() continues exactly behind it.
    """
    rows = TrainingRows(path, tokenizer, max_length=max_length, thinking=thinking, vocab_size=vocab_size)
    report(f"{path}: {len(rows)} of {rows.num_read} rows are trained on, {rows.num_skipped} have no anchor")
    return batches(rows, max_length=max_length, batch_size=batch_size, seed=seed)


def batches(rows: TrainingRows, *, max_length: int, batch_size: int, seed: int) -> grain.IterDataset:
    """Shuffled, endless batches over rows that are read already."""
    dataset = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
    dataset = dataset.map(lambda numbered: pad_row(numbered, max_length)).batch(batch_size)
    # A row is a copy of a few kilobytes: two threads stay ahead of any device.
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8))
