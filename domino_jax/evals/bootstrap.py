"""95 % intervals of measured figures: the same figure over rows drawn again, with replacement, from those measured."""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.stats

LEVEL, RESAMPLES, SEED = 0.95, 2000, 0

Interval = list[float] | None


def interval(figure: Callable[..., Any], *columns: Any) -> Interval:
    """The [low, high] of a figure of columns [N] whose rows are drawn together.

    Rows that are 0 in all columns, such as answers without a round, change no figure and are left out.

    Args:
        figure: (*columns, axis) → its value over that axis.
    Returns:
        None for fewer than two rows.
    """
    values = np.stack([np.asarray(column, float) for column in columns])
    values = values[:, values.any(axis=0)]
    if values.shape[1] < 2:
        return None
    options = {"n_resamples": RESAMPLES, "confidence_level": LEVEL, "method": "percentile", "batch": 100, "rng": SEED}
    bounds = scipy.stats.bootstrap(tuple(values), figure, paired=True, vectorized=True, **options).confidence_interval
    return [float(bounds.low), float(bounds.high)]


def pooled(above: np.ndarray, below: np.ndarray, axis: int = -1) -> Any:
    """The sum of `above` by that of `below`."""
    return above.sum(axis=axis) / below.sum(axis=axis)
