"""A run continues only with what it was started with. One comparison and one message for every command."""

from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.runtime.errors import DominoError, quote

SHOWN = 3  # lines of differences: with the first and the last, a message has five

Differences = dict[str, tuple[Any, Any]]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Differences:
    """Dotted key → (value before, value now) wherever two nested mappings differ; None for a key that one lacks."""
    old, new = flatten(before), flatten(now)
    pairs = {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted key → value of every leaf of nested mappings."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def refuse(changes: Differences, heading: str, advice: str) -> None:
    """A DominoError of at most five lines when there are differences.

    heading: the first line, what was made with something else.  advice: the last line, what to do.
    """
    if changes:
        raise DominoError("\n".join([heading, *_lines(changes), advice]))


def _lines(changes: Differences) -> Sequence[str]:
    lines = [f"  {key}: {quote(before)} before, {quote(now)} now" for key, (before, now) in changes.items()]
    return lines if len(lines) <= SHOWN else [*lines[: SHOWN - 1], f"  and {len(lines) - SHOWN + 1} more"]
