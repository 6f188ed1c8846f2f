"""Which tokens the answers of training rows use most: a drafter's own vocabulary and decode.draft_vocab."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from domino_jax.data.chat import TrainingRow
from domino_jax.data.prompts import lines_of
from domino_jax.data.rows import RowEncoder, TrainingRows
from domino_jax.runtime.progress import Progress

COUNTED_ROWS = 16_384  # more of them hardly change the order, and long ones take 11 ms each
LONGEST = 1 << 20  # tokens of a row


def order_of_rows(rows: TrainingRows, vocab: int) -> np.ndarray:
    """`order_of` rows that are drawn evenly from all."""
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), COUNTED_ROWS)).round().astype(np.int64))
    return order_of((rows[int(place)][1] for place in places), vocab, len(places))


def order_of_rows_in(pattern: str, tokenizer: Any, vocab: int) -> np.ndarray:
    """`order_of` the first rows of data.train."""
    encode = RowEncoder(tokenizer, LONGEST, thinking=False, vocab_size=vocab)
    encoded = itertools.chain.from_iterable(encode(*line) for line in lines_of(pattern))
    return order_of(itertools.islice(encoded, COUNTED_ROWS), vocab)


def order_of(rows: Iterable[TrainingRow], vocab: int, count: int | None = None) -> np.ndarray:
    """The supervised tokens that occur, int32, the most frequent first; ties go to the lower id.

    vocab: tokens that there are.  count: of the rows, where it is known.
    """
    counts = np.zeros(vocab, np.int64)
    progress = Progress("counting tokens", count or COUNTED_ROWS)
    for row in rows:
        counts += np.bincount(row.token_ids[row.loss_mask > 0.5], minlength=vocab)
        progress.advance(1)
    order = np.argsort(-counts, kind="stable")
    return order[: np.count_nonzero(counts)].astype(np.int32)


def frequent_tokens(order: np.ndarray, vocab: int, count: int, always: Sequence[int] = ()) -> np.ndarray:
    """The `count` most frequent tokens, ascending, int32; those that never occurred follow by id.

    order: as of `order_of`.  count: at most `vocab`.  always: tokens that are in whatever their place.
    """
    ranked = [*always, *order.tolist(), *range(vocab)]
    return np.sort(np.fromiter(itertools.islice(dict.fromkeys(ranked), count), np.int32))
