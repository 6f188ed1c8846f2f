"""The caches of finished texts: a prompt that begins as one of them is read from the first token that differs."""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from domino_jax.models.cache import Cache

SHORTEST = 16  # tokens of a prefix that is worth a program: chat templates begin all texts alike


@dataclasses.dataclass(frozen=True, eq=False)
class CachedText:
    """What both models keep of one text.

    token_ids: int32 [T].  target_cache, draft_cache: of one row, T slots or more; draft_cache is () after plain
        decoding.
    """

    token_ids: np.ndarray
    target_cache: Cache
    draft_cache: Any

    @property
    def caches(self) -> tuple:
        return self.target_cache, self.draft_cache

    def common(self, prompt: np.ndarray) -> int:
        """The number of tokens that the prompt and this text begin with alike."""
        size = min(len(prompt), len(self.token_ids))
        unequal = np.flatnonzero(prompt[:size] != self.token_ids[:size])
        return int(unequal[0]) if len(unequal) else size


class Prefixes:
    """At most `count` texts of `most_bytes` bytes together. The one that was not used for the longest time goes first.

    Only keys and values are taken over, which depend on the tokens up to their own. The last token of the common prefix
    is read again: EAGLE-3's row for it also holds the token after it. Everything else that a drafter keeps follows from
    the last token of the prompt (kinds.py), which is always read.
    """

    def __init__(self, count: int, most_bytes: int):
        self.count = count
        self.most_bytes = most_bytes
        self.texts: OrderedDict[int, CachedText] = OrderedDict()
        self.bytes = 0
        self._numbers = 0

    def longest(self, prompt: Sequence[int], plain: bool) -> tuple[CachedText | None, int]:
        """The text with the longest prefix of the prompt and how many of its rows to take; (None, 0) without one.

        plain: texts without a drafter's cache will do.
        """
        prompt = np.asarray(prompt, np.int32)
        usable = [number for number, text in self.texts.items() if plain or text.draft_cache]
        lengths = {number: min(self.texts[number].common(prompt), len(prompt)) - 1 for number in usable}
        best = max(lengths, key=lengths.__getitem__, default=None)
        if best is None or lengths[best] < SHORTEST:
            return None, 0
        self.texts.move_to_end(best)
        return self.texts[best], lengths[best]

    def add(self, text: CachedText) -> None:
        """Stores a text in place of those that it goes on from, then drops the oldest that are too many.

        A text that has more than `most_bytes` by itself is not stored.
        """
        if _bytes(text) > self.most_bytes:
            return
        for number, earlier in list(self.texts.items()):
            if earlier.common(text.token_ids) == len(earlier.token_ids) and (
                text.draft_cache or not earlier.draft_cache
            ):
                self._drop(number)
        self._numbers += 1
        self.texts[self._numbers] = text
        self.bytes += _bytes(text)
        while len(self.texts) > self.count or self.bytes > self.most_bytes:
            self._drop(next(iter(self.texts)))

    def clear(self) -> None:
        while self.texts:
            self._drop(next(iter(self.texts)))

    def _drop(self, number: int) -> None:
        self.bytes -= _bytes(self.texts.pop(number))


def _bytes(text: CachedText) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(text.caches))
