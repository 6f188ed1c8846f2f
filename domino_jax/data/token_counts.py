"""Which tokens the answers of the training rows use most: the draft vocabulary of EAGLE-3."""

import numpy as np

from domino_jax.data.rows import TrainingRows

COUNTED_ROWS = 65_536  # drawn evenly from all; of a large data set more rows hardly change the order


def frequent_tokens(rows: TrainingRows, vocab: int, count: int) -> np.ndarray:
    """The `count` most frequent supervised tokens, ascending, int64; ties go to the lower id.

    Args:
        vocab: tokens that there are.  count: at most as many; tokens that no answer has fill up what is missing.
    """
    places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), COUNTED_ROWS)).round().astype(np.int64))
    counts = np.zeros(vocab, np.int64)
    for place in places:
        _, row = rows[int(place)]
        counts += np.bincount(row.token_ids[row.loss_mask > 0.5], minlength=vocab)
    return np.sort(np.argsort(-counts, kind="stable")[:count])
