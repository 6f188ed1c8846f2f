"""Target and drafter with their parameters, one argument of the jitted functions, and what the one gives the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from domino_jax.method.backbone import transformed_logits
from domino_jax.models.cache import resize
from domino_jax.models.layers import Linear
from domino_jax.models.qwen3 import Qwen3
from domino_jax.models.shapes import Features


class TargetRows(NamedTuple):
    """Rows of text that the target has read, at consecutive positions, at prefill and when a round commits its tokens.

    A drafter uses what it needs of them.

    features: [B, T, C·D], outputs of the tapped layers.
    following: [B, T, D], the target's embedding of the token after each row.
    count: int32 [B], how many rows, from the first on, are text; the others are padding or rejected drafts.
    """

    features: Features
    following: jax.Array | None = None
    count: jax.Array | None = None

    def last(self, rows: jax.Array, before: jax.Array) -> jax.Array:
        """The last of rows [B, T, D] that is text, [B, D]; `before` [B, D] where none is."""
        place = jnp.maximum(self.count - 1, 0)[:, None, None]
        row = jnp.take_along_axis(rows, place, axis=1)[:, 0]
        return jnp.where(self.count[:, None] > 0, row, before)


@flax.struct.dataclass
class Models:
    """The modules are static, the parameters are arrays. drafter and drafter_params are None for plain decoding."""

    target: Qwen3 = flax.struct.field(pytree_node=False)
    target_params: dict
    drafter: Any = flax.struct.field(pytree_node=False, default=None)
    drafter_params: dict | None = None

    def run_target(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.target.apply({"params": self.target_params}, *args, **kwargs)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [...] → the target's embedding rows [..., D]."""
        return self.target.apply({"params": self.target_params}, tokens, method=Qwen3.embed)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] → the target's float32 logits [..., V]."""
        return self.target.apply({"params": self.target_params}, hidden, method=Qwen3.unembed)

    def with_gathered_head(self) -> "Models":
        """These models for many calls of `unembed` and `draft_logits` in one program: the matrix is gathered once."""
        return self.replace(target_params=self.target.with_gathered_head(self.target_params))

    def draft_logits(self, z: jax.Array) -> jax.Array:
        """The backbone's z [..., D] → its base logits float32 [..., N].

        N: tokens of the draft vocabulary, whose columns of the lm_head are the drafter's parameters; else V.
        """
        config = self.drafter.config
        if len(config.draft_tokens):
            head = Linear(len(config.draft_tokens), dtype=self.target.dtype, logits=True, name="lm_head")
            logits = head.apply({"params": self.drafter_params["lm_head"]}, z)
        else:
            logits = self.unembed(z)
        return transformed_logits(logits, config)

    def extend_context(self, cache: Any, text: TargetRows, positions: jax.Array) -> Any:
        """What the drafter keeps of the text (kinds.py), with the rows that the target has read."""
        return self._drafter("extend_context", cache, text, positions)

    def fit_context(self, context: Any, slots: int) -> Any:
        """What the drafter keeps of the text, () without one, beside a target's cache of `slots` slots."""
        return tuple(resize(part, self.drafter.config.kept_slots(i, slots)) for i, part in enumerate(context))

    def draft_hidden(self, *args: Any) -> Any:
        return self._drafter("draft_hidden", *args)

    def draft_step(self, *args: Any) -> tuple:
        return self._drafter("draft_step", *args)

    def head_inputs(self, tokens: jax.Array) -> jax.Array:
        """What the head reads of tokens int32 [...]: their embeddings [..., D] or the tokens themselves."""
        return self.embed(tokens) if self.drafter.config.reads_embeddings else tokens

    def block_codes(self, z: jax.Array, tokens: jax.Array) -> jax.Array:
        """Codes [B, A, M, E] of blocks z [B, A, G, D] after `tokens` int32 [B, A, T]."""
        return self._drafter(lambda drafter: drafter.block_codes(z, self.head_inputs(tokens)))

    @property
    def reads_ahead(self) -> bool:
        """Whether `head_reading` is a product, worth computing for all candidates at once where they are few."""
        return self._drafter(lambda drafter: drafter.head.reads_ahead)

    def head_start(self, *batch: int) -> Any:
        """The head's state before any token (`Head.initial_state`)."""
        return self._drafter(lambda drafter: drafter.head.initial_state(*batch))

    def head_hidden_half(self, z: jax.Array) -> jax.Array:
        return self._drafter(lambda drafter: drafter.head.hidden_half(z))

    def head_codes(self, halves: jax.Array, tokens: jax.Array) -> jax.Array:
        """Codes [B, t, E] of the first t slots after `tokens` int32 [B, t]."""
        return self._drafter(lambda drafter: drafter.head.codes_after(halves, self.head_inputs(tokens)))

    def head_step(self, state: Any, tokens: jax.Array, half: jax.Array) -> tuple[Any, jax.Array]:
        """(the head's state after `tokens` int32 [...], the code [..., E] of the slots that follow them)."""
        return self._drafter(lambda drafter: drafter.head.step(state, self.head_inputs(tokens), half))

    def head_reading(self, tokens: jax.Array) -> jax.Array:
        """What a step of a head that reads ahead reads of `tokens` int32 [...], [..., any]."""
        return self._drafter(lambda drafter: drafter.head.reading(self.head_inputs(tokens)))

    def head_advance(self, state: Any, reading: jax.Array, half: jax.Array) -> tuple[Any, jax.Array]:
        """`head_step` from the tokens' `head_reading`."""
        return self._drafter(lambda drafter: drafter.head.advance(state, reading, half))

    def confidence(self, z: jax.Array, tokens: jax.Array) -> jax.Array:
        """Logits float32 [...] of the confidence head, for slots z [..., D] after `tokens` int32 [...]."""
        return self._drafter(lambda drafter: drafter.head.confidence(z, tokens))

    def head_rows(self, columns: jax.Array) -> jax.Array:
        return self._drafter(lambda drafter: drafter.head.rows(columns))

    def residual(self, code: jax.Array) -> jax.Array:
        return self._drafter(lambda drafter: drafter.head.residual(code))

    def residual_of(self, code: jax.Array, rows: jax.Array) -> jax.Array:
        return self._drafter(lambda drafter: drafter.head.residual_of(code, rows))

    def _drafter(self, method: str | Callable, *args: Any) -> Any:
        return self.drafter.apply({"params": self.drafter_params}, *args, method=method)
