"""Text from tokens as they come: a character whose bytes are spread over tokens is shown once it is whole."""

from collections.abc import Sequence
from typing import Any

# What a decoder writes for bytes that are no character (yet).
BROKEN = "\ufffd"


class TextStream:
    """Takes token ids piece by piece and returns the text that is certain by then; special tokens are left out.

    A tokenizer may write a token differently behind another one (a leading space, the bytes of a character), so each
    call decodes the tokens since the last certain place together with those of the piece before it, and returns what
    came to it.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # the tokens that are decoded together with new ones begin here
        self.shown = 0  # tokens before this one were returned as text

    def add(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that `token_ids` make certain; all that is left when they are the last ones."""
        if self.tokenizer is None:
            return "".join(f"{token} " for token in token_ids)
        self.ids += token_ids
        before = self._decode(self.ids[self.start : self.shown])
        text = self._decode(self.ids[self.start :])
        if text.endswith(BROKEN) and not last:
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return text[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if len(ids) else ""
