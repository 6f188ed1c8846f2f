"""Cases that cover every pair of values of several axes."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def pairwise(axes: Mapping[str, Sequence[Any]], valid: Callable[..., bool]) -> list[dict[str, Any]]:
    """A few valid cases that contain every pair of values that some valid case contains; the same ones every time."""
    cases = [case for values in itertools.product(*axes.values()) if valid(**(case := dict(zip(axes, values))))]  # noqa: B905
    pairs = [frozenset(itertools.combinations(case.items(), 2)) for case in cases]
    missing, chosen = frozenset().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda place: len(pairs[place] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen
