"""The training-time test: in training the head reads its own greedy drafts, as it does when it decodes.

Otherwise it reads the true tokens of the text (teacher forcing). Labels are the text's tokens in both cases.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from domino_jax.method.candidates import Candidates
from domino_jax.method.pair import Models
from domino_jax.method.rollout import roll_out_blocks
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

    def tokens_before(part):
        z, anchors = part
        drafts = roll_out_blocks(models, anchors, z, Candidates(None, jax.lax.stop_gradient(unembed(z))))
        return jnp.concatenate([anchors[..., None], drafts[..., :-1]], axis=-1)

    return joined(jax.lax.map(tokens_before, parts), 1, count)
