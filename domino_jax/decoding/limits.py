"""The limits of a prompt and its answer: the vocabulary, the token buffer, the models' positions, the caches."""

import dataclasses
from collections.abc import Sequence

from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.pair import Pair
from domino_jax.runtime.errors import DataError, DominoError


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits that settings and models set to one generator.

    vocab: rows of the target's embedding.  block_rows: cache rows that a round writes after the committed ones.
    positions: the smaller max_position_embeddings of target and drafter.  model: whose that is.
    """

    settings: DecodeSettings
    vocab: int
    block_rows: int
    positions: int
    model: str

    @classmethod
    def of(cls, models: Pair, settings: DecodeSettings) -> "Limits":
        """Raises DominoError for a max_new_tokens that leaves no position for a prompt."""
        modules = {"target": models.target, "drafter": models.drafter}
        positions = {name: module.config.max_position_embeddings for name, module in modules.items() if module}
        model = min(positions, key=positions.__getitem__)
        if settings.max_new_tokens >= positions[model]:
            raise DominoError(
                f"max_new_tokens is {settings.max_new_tokens}, but the {model}'s max_position_embeddings is"
                f" {positions[model]}, so no prompt fits; lower max_new_tokens."
            )
        block_rows = settings.block_rows(models.drafter and models.drafter.config)
        return cls(settings, models.target.config.vocab_size, block_rows, positions[model], model)

    def room(self, new_tokens: int) -> int:
        """The most tokens that a prompt with `new_tokens` of answer may have."""
        return min(self.positions, self.settings.cache_length - self.block_rows) - new_tokens

    def check_room(self, prompt_tokens: int, new_tokens: int, name: str) -> None:
        """Raises DataError when these tokens together have more positions than a model knows, or more cache rows.

        The slots of a round's block after the last token may be beyond the positions, because none of these is emitted.
        """
        needed, problem = prompt_tokens + new_tokens + self.block_rows, None
        if prompt_tokens + new_tokens > self.positions:
            problem = (
                f"has {prompt_tokens} tokens and asks for {new_tokens} more, but the {self.model}'s"
                f" max_position_embeddings is {self.positions}; shorten the prompt or lower max_new_tokens"
            )
        elif needed > self.settings.cache_length:
            problem = (
                f"needs {needed} cache rows ({prompt_tokens} prompt + {new_tokens} new + {self.block_rows} block), but"
                f" decode.cache_length is {self.settings.cache_length}; raise it, or shorten the prompt or"
                " max_new_tokens"
            )
        if problem:
            raise DataError(f"{name} {problem}.")

    def check_prompt(self, prompt: Sequence[int], new_tokens: int, name: str) -> None:
        """Raises DataError when the prompt is empty, holds an id outside the vocabulary, or does not fit."""
        wrong = [token for token in prompt if not 0 <= token < self.vocab]
        most, problem = self.settings.max_new_tokens, None
        if not len(prompt):
            problem = "is empty; give it at least one token"
        elif wrong:
            problem = f"holds token id {wrong[0]}, but the target has {self.vocab} embedding rows"
        elif not 1 <= new_tokens <= most:
            problem = f"asks for {new_tokens} new tokens, but max_new_tokens allows 1 to {most}; change one of them"
        if problem:
            raise DataError(f"{name} {problem}.")
        self.check_room(len(prompt), new_tokens, name)
