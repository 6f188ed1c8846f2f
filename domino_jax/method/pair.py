"""A target and its drafter with their parameters, as one argument of jitted functions, and the rows that the target
gives the drafter."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from domino_jax.method.backbone import transformed_logits
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
class Pair:
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

    def with_gathered_head(self) -> "Pair":
        """These models for many calls of `unembed` in one program: the target's matrix is gathered once."""
        return self.replace(target_params=self.target.with_gathered_head(self.target_params))

    def draft_logits(self, z: jax.Array) -> jax.Array:
        """The backbone's z [..., D] → its base logits float32 [..., N].

        N: tokens of the draft vocabulary, else V. A copy of the lm_head's columns, for a draft vocabulary or in eight
        bits, is among the drafter's parameters.
        """
        config = self.drafter.config
        if "lm_head" in self.drafter_params:
            columns = len(config.draft_tokens) or config.vocab_size
            head = Linear(columns, dtype=self.target.dtype, logits=True, name="lm_head")
            logits = head.apply({"params": self.drafter_params["lm_head"]}, z)
        else:
            logits = self.unembed(z)
        return transformed_logits(logits, config)

    @property
    def bound(self) -> Any:
        """The drafter's module with its parameters. It is bound at each access, because a bound module belongs to the
        traced function, such as the body of a loop, in which it was made."""
        return self.drafter.bind({"params": self.drafter_params})

    @property
    def head(self) -> Any:
        """The drafter's head (head.Head) with its parameters, as `bound`."""
        return self.bound.head

    def row_states(self, features: Features, batch: dict[str, jax.Array], passes: int) -> jax.Array:
        """The states [B, S, J, D] of J passes of a drafter without a backbone over all rows of a training batch.

        features: of the target.  Past the row its tokens are token 0.
        """
        embedded = self.embed(jnp.pad(batch["tokens"], ((0, 0), (0, passes))))
        return self.bound(features, embedded, passes, batch.get("positions"), batch.get("documents"))

    def head_inputs(self, tokens: jax.Array) -> jax.Array:
        """Turns tokens int32 [...] into what the head reads: their embeddings [..., D] or the tokens themselves."""
        return self.embed(tokens) if self.drafter.config.reads_embeddings else tokens
