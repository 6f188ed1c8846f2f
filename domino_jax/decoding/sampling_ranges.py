"""The ranges of the sampling values. Apart from sampling.py, which starts jax: a recipe is checked before that."""

import math

LARGEST = 2**31 - 1  # of a number on its way to an int32 of the device


def outside_range(temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> tuple[str, float, str] | None:
    """(name, value, what to do) of the first value that is outside its range, NaN too; None when all are inside."""
    ranges = (
        ("temperature", temperature, 0 <= temperature < math.inf, "set it to 0 (greedy) or a finite number above"),
        ("top_k", top_k, top_k >= 0, "set it to 0 (off) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "set it above 0 and at most 1 (1 is off)"),
        ("min_p", min_p, 0 <= min_p < 1, "set it to 0 (off) or more, below 1"),
    )
    return next(((name, value, change) for name, value, inside, change in ranges if not inside), None)
