"""What a pass of the target over text gives a drafter: at prefill, and when a round commits its tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.models.shapes import Features, Hidden


class Passed(NamedTuple):
    """Rows of text that the target has read, at consecutive positions. A drafter uses what it needs of them.

    features: [B, T, C·D], outputs of the tapped layers; None where the drafter taps none.
    hidden: [B, T, D], the last hidden states after the final norm.
    following: [B, T, D], the target's embedding of the token after each row.
    count: int32 [B], how many rows, from the first on, are text; the others are padding or rejected drafts.
    """

    features: Features | None
    hidden: Hidden | None = None
    following: jax.Array | None = None
    count: jax.Array | None = None

    def last(self, rows: jax.Array, before: jax.Array) -> jax.Array:
        """The last of rows [B, T, D] that is text, [B, D]; `before` [B, D] where none is."""
        place = jnp.maximum(self.count - 1, 0)[:, None, None]
        found = jnp.take_along_axis(rows, place, axis=1)[:, 0]
        return jnp.where(self.count[:, None] > 0, found, before)
