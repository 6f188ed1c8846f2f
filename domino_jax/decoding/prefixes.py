"""The caches of finished texts: a prompt that begins as one of them is read from the first token that differs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from domino_jax.models.cache import Cache

SHORTEST = 16  # tokens of a prefix that is worth a program: chat templates begin all texts alike


@dataclasses.dataclass(frozen=True, eq=False)
class CachedText:
    """The caches of both models for one text.

    token_ids: int32 [T].  target_cache, draft_cache: of one row, T slots or more; draft_cache is () after plain
        decoding.
    """

    token_ids: np.ndarray
    target_cache: Cache
    draft_cache: Any

    @property
    def bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((self.target_cache, self.draft_cache)))

    def common(self, prompt: np.ndarray) -> int:
        """The number of tokens that the prompt and this text begin with alike."""
        size = min(len(prompt), len(self.token_ids))
        unequal = np.flatnonzero(prompt[:size] != self.token_ids[:size])
        return int(unequal[0]) if len(unequal) else size


class Prefixes:
    """At most `count` texts of `most_bytes` bytes together. The least recently used one is dropped first.

    A prompt takes over keys and values alone, which depend on the tokens up to their own. It reads the last token of
    the common prefix again, because a drafter's row for it may also hold the token after it. Everything else that a
    drafter keeps follows from the last token of the prompt (method/drafters.py), which is always read.
    """

    def __init__(self, count: int, most_bytes: int):
        self.count, self.most_bytes = count, most_bytes
        self.texts: list[CachedText] = []  # least recently used first

    @property
    def bytes(self) -> int:
        return sum(text.bytes for text in self.texts)

    def longest(self, prompt: Sequence[int], plain: bool) -> tuple[CachedText | None, int]:
        """The text with the longest prefix of the prompt and how many of its rows to take; (None, 0) without one.
        plain: texts without a drafter's cache will do."""
        prompt = np.asarray(prompt, np.int32)
        usable = [text for text in self.texts if plain or text.draft_cache]
        best = max(usable, key=lambda text: text.common(prompt), default=None)
        length = best.common(prompt) - 1 if best else 0
        if length < SHORTEST:
            return None, 0
        self.texts.remove(best)
        self.texts.append(best)
        return best, length

    def add(self, text: CachedText) -> None:
        """Stores a text, unless it alone is too large, in place of those that it goes on from; drops the oldest."""
        if text.bytes > self.most_bytes:
            return

        def replaced(earlier: CachedText) -> bool:
            continued = earlier.common(text.token_ids) == len(earlier.token_ids)
            return continued and bool(text.draft_cache or not earlier.draft_cache)

        self.texts = [*(earlier for earlier in self.texts if not replaced(earlier)), text]
        while len(self.texts) > self.count or self.bytes > self.most_bytes:
            del self.texts[0]

    def clear(self) -> None:
        self.texts.clear()
