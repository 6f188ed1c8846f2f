"""Text from tokens piece by piece: a character whose bytes are spread over tokens is shown when it is complete."""

from collections.abc import Sequence
from typing import Any

# A decoder writes this for bytes that are not a character (yet).
BROKEN = "\ufffd"


class TextStream:
    """Takes token ids piece by piece and returns the text that is certain so far; special tokens are left out.

    A tokenizer may write a token differently after another one (a leading space, the bytes of a character). So each
    call decodes the new tokens together with the tokens of the piece before, and returns the text that they add.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = 0  # the first token that is decoded together with new ones
        self.shown = 0  # tokens before this one were returned as text

    def add(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that `token_ids` make certain; all remaining text when they are the last ones."""
        if self.tokenizer is None:
            return "".join(f"{token} " for token in token_ids)
        self.ids += token_ids
        before = self._decode(self.ids[self.start : self.shown])
        text = self._decode(self.ids[self.start :])
        if text.endswith(BROKEN) and not last:
            return ""
        # Tokens without text, as special ones, do not tell a decoder whether a space belongs between two pieces.
        self.start, self.shown = self.shown if len(text) > len(before) else self.start, len(self.ids)
        return text[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True) if len(ids) else ""
