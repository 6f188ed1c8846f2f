"""Which tokens the answers of the training rows use most: the draft vocabulary of EAGLE-3."""

import numpy as np
import rich.console

from domino_jax.data.rows import TrainingRows
from domino_jax.runtime.distributed import is_primary
from domino_jax.runtime.progress import PATIENCE, Progress

COUNTED_ROWS = 16_384  # drawn evenly from all; more of them hardly change the order, and long ones take 11 ms each


def frequent_tokens(rows: TrainingRows, vocab: int, count: int) -> np.ndarray:
    """The `count` most frequent supervised tokens, ascending, int64; ties go to the lower id.

    Args:
        vocab: tokens that there are.
        count: at most `vocab`. If fewer tokens occur, the lowest unused ids fill the rest.
    """
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), COUNTED_ROWS)).round().astype(np.int64))
    counts = np.zeros(vocab, np.int64)
    console = rich.console.Console(quiet=not is_primary())
    with Progress("counting tokens", len(places), console=console, after=PATIENCE) as progress:
        for place in places:
            _, row = rows[int(place)]
            counts += np.bincount(row.token_ids[row.loss_mask > 0.5], minlength=vocab)
            progress.advance(1)
    return np.sort(np.argsort(-counts, kind="stable")[:count])
