"""The training-time test: in training the head reads its own greedy drafts, as it does when it decodes.

Otherwise it reads the true tokens of the text (teacher forcing). Labels are the text's tokens in both cases.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from domino_jax.drafters.pair import Models
from domino_jax.models.shapes import Hidden, Logits
from domino_jax.models.slices import cut, joined


def greedy_tokens(
    models: Models, z: Hidden, anchors: jax.Array, unembed: Callable[[Hidden], Logits], slice_blocks: int
) -> jax.Array:
    """int32 [B, A, M], the tokens before the predicting slots: the anchor, then the head's greedy draft of each slot.

    No gradient flows through the rollout. Logits of `slice_blocks` blocks of each row are in memory at once.

    Args:
        z: [B, A, M, D] of the predicting slots.  anchors: int32 [B, A], the anchors' tokens.
        unembed: hidden states [..., D] → base logits [..., V].
    """
    models = jax.lax.stop_gradient(models)
    count = anchors.shape[1]
    size = min(slice_blocks, count)
    parts = (cut(jax.lax.stop_gradient(z), 1, size), cut(anchors, 1, size))
    drafted = jax.lax.map(lambda part: _roll_out(models, *part, unembed), parts)
    return joined(drafted, 1, count)


def _roll_out(models: Models, z: Hidden, anchors: jax.Array, unembed: Callable[[Hidden], Logits]) -> jax.Array:
    """Of one slice, z [B, n, M, D] and anchors [B, n]; the slots follow one another."""
    corrected = jnp.arange(z.shape[2]) >= models.drafter.config.pure_draft_prefix_len

    def draft(carry, slot):
        state, token = carry
        half, logits, corrected = slot
        state, code = models.head_step(state, token, half)
        logits = logits + jnp.where(corrected, models.residual(code), 0.0)
        return (state, jnp.argmax(logits, axis=-1).astype(jnp.int32)), token

    slots = [jnp.moveaxis(x, 2, 0) for x in (models.head_hidden_half(z), jax.lax.stop_gradient(unembed(z)))]
    start = (models.head_start(*anchors.shape), anchors)
    _, before = jax.lax.scan(draft, start, (*slots, corrected))
    return jnp.moveaxis(before, 0, 2)
