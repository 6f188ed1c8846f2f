"""A prompt on its way through its turns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.requests import Request


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One turn of one prompt row, ready to be decoded.

    request: for `Generator.generate`; its noise id is the row's place in its task or file.
    task: None for rows of no task.  turn: 1, 2, … of a conversation.
    row: with the messages so far, where later_turns (the messages before each further answer) continue them.
    """

    id: str
    token_ids: Sequence[int]
    request: int | Request
    task: str | None = None
    turn: int = 1
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    later_turns: tuple[Sequence[Mapping[str, Any]], ...] = ()

    @property
    def answer_id(self) -> str:
        """The id in generations.jsonl: the row's, followed by #2, #3, … for later turns."""
        return self.id if self.turn == 1 else f"{self.id}#{self.turn}"

    @property
    def turns_left(self) -> int:
        return 1 + len(self.later_turns)

    def next_turn(self, answer: str, codec: TextCodec) -> "Prompt":
        """The prompt that continues the conversation after `answer`."""
        turn, *later = self.later_turns
        row = {**self.row, "messages": [*self.row["messages"], {"role": "assistant", "content": answer}, *turn]}
        changes = {"turn": self.turn + 1, "row": row, "later_turns": tuple(later)}
        return dataclasses.replace(self, token_ids=tuple(codec.encode(row)), **changes)
