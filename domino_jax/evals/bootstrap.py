"""95 % intervals of measured figures: the same figure over rows drawn again, with replacement, from those measured."""

from collections.abc import Callable
from typing import Any

import numpy as np

LEVEL, RESAMPLES, SEED = 0.95, 2000, 0
BATCHES = 20  # of resamples, so that memory stays small with many rows

Interval = list[float] | None


def interval(figure: Callable[..., Any], *columns: Any) -> Interval:
    """The [low, high] of a figure of columns [N] whose rows are drawn together.

    Rows that are 0 in all columns, such as answers without a round, change no figure and are left out.

    Args:
        figure: (*columns, axis) → its value over that axis.
    Returns:
        None for fewer than two rows, and where no draw has the figure: answers of one token have no rate.
    """
    values = np.stack([np.asarray(column, float) for column in columns])
    values = values[:, values.any(axis=0)]
    if values.shape[1] < 2:
        return None
    rng, rows = np.random.default_rng(SEED), values.shape[1]
    drawn = [rng.integers(0, rows, (RESAMPLES // BATCHES, rows)) for _ in range(BATCHES)]
    with np.errstate(divide="ignore", invalid="ignore"):
        figures = np.concatenate([figure(*values[:, places], axis=-1) for places in drawn])
    figures = figures[np.isfinite(figures)]
    return np.quantile(figures, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist() if len(figures) else None


def pooled(above: np.ndarray, below: np.ndarray, axis: int = -1) -> Any:
    """The sum of `above` by that of `below`."""
    return above.sum(axis=axis) / below.sum(axis=axis)
