"""Training blocks as pure functions: anchors, block tokens, labels, weights, head inputs.

Everything takes the anchors as an argument, so that a test can choose them. Letters: B rows, S tokens of a row, A
anchors, G slots.
"""

import jax
import jax.numpy as jnp

from domino_jax.models.shapes import Tokens


def legal_anchors(loss_mask: jax.Array, documents: jax.Array | None = None) -> jax.Array:
    """bool [B, S]: t is legal when t and t+1 are both supervised; the last position never is.

    In packed rows (documents int32 [B, S]) both have to be of one document.

    >>> loss_mask 0 1 1 1 0 1  →  0 1 1 0 0 0    documents 1 1 1 2 2 2  →  0 1 0 0 0 0
    """
    supervised = loss_mask > 0.5
    legal = supervised & jnp.roll(supervised, -1, axis=1).at[:, -1].set(False)
    if documents is not None:
        legal &= documents == jnp.roll(documents, -1, axis=1)
    return legal


def sample_anchors(
    key: jax.Array, loss_mask: jax.Array, row_ids: jax.Array, count: int, documents: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Draws `count` legal anchors per row, uniform without replacement, ascending.

    A random number per position, illegal ones last, the first `count` taken. The key is folded with the row's id, so a
    row gets the same anchors whatever the batch or mesh around it, and however far it is padded.

    Args:
        key: the step's key.  loss_mask: float32 [B, S].  row_ids: int32 [B].
    Returns:
        anchors int32 [B, A] and keep bool [B, A], A at most S - 1, which is all that a row can have; a row with fewer
        legal positions has keep False and anchor 0 at its end.
    """
    legal = legal_anchors(loss_mask, documents)
    length = loss_mask.shape[1]
    count = min(count, length - 1)

    def draw(row_id):
        return jax.random.uniform(jax.random.fold_in(key, row_id), (length,))

    order = jnp.where(legal, jax.vmap(draw)(row_ids), jnp.inf)
    chosen = jnp.argsort(order, axis=1)[:, :count]
    keep = jnp.take_along_axis(order, chosen, axis=1) < jnp.inf
    anchors = jnp.sort(jnp.where(keep, chosen, length), axis=1)
    keep = anchors < length
    return jnp.where(keep, anchors, 0).astype(jnp.int32), keep


def gather_positions(values: jax.Array, positions: jax.Array) -> jax.Array:
    """values [B, S] at positions [B, A, G], clamped to the row → [B, A, G]."""
    clamped = jnp.clip(positions, 0, values.shape[1] - 1).reshape(values.shape[0], -1)
    return jnp.take_along_axis(values, clamped, axis=1).reshape(positions.shape)


def slot_positions(anchors: jax.Array, block_size: int) -> jax.Array:
    """int32 [B, A, G]: a, a+1, …, a+G-1; not clamped, so that positions past the row stay distinct."""
    return anchors[:, :, None] + jnp.arange(block_size)


def label_positions(anchors: jax.Array, block_size: int, first_slot: int) -> jax.Array:
    """int32 [B, A, G]: where the label of each slot is, a+1+k of shifted blocks and a+k of unshifted ones; not clamped.

    first_slot: `DrafterConfig.first_slot`, 0 of shifted blocks.
    """
    return slot_positions(anchors, block_size) + 1 - first_slot


def block_tokens(tokens: Tokens, anchors: jax.Array, keep: jax.Array, block_size: int, mask_token_id: int) -> jax.Array:
    """int32 [B, A, G]: the anchor's token in slot 0 (the mask token where keep is False), mask tokens after it."""
    first = jnp.where(keep, jnp.take_along_axis(tokens, anchors, axis=1), mask_token_id)
    masks = jnp.full((*anchors.shape, block_size - 1), mask_token_id, tokens.dtype)
    return jnp.concatenate([first[:, :, None], masks], axis=-1)


def labels_and_mask(
    tokens: Tokens,
    loss_mask: jax.Array,
    anchors: jax.Array,
    keep: jax.Array,
    *,
    block_size: int,
    first_slot: int,
    contiguous: bool,
    documents: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Labels int32 and raw weights float32, each [B, A, G].

    Slot k is labelled by the token at its place in `label_positions`; slots before `first_slot` have no weight. With
    contiguous True a block stops at its first unsupervised token, so it never runs on into the next turn; False is the
    public trainer's way. In packed rows (documents int32 [B, S]) no label is taken from another document than the
    anchor's.
    """
    positions = label_positions(anchors, block_size, first_slot)
    labels = gather_positions(tokens, positions)
    supervised = (gather_positions(loss_mask, positions) > 0.5) & (positions < tokens.shape[1]) & keep[:, :, None]
    if documents is not None:
        supervised &= (
            gather_positions(documents, positions) == jnp.take_along_axis(documents, anchors, axis=1)[..., None]
        )
    weights = supervised.astype(jnp.float32)
    if contiguous:
        weights = weights.at[:, :, first_slot:].set(jnp.cumprod(weights[:, :, first_slot:], axis=-1))
    return labels, weights.at[:, :, :first_slot].set(0.0)


def position_decay(block_size: int, first_slot: int, gamma: float | None) -> jax.Array:
    """float32 [G]: exp(-i/γ) for the i-th predicted slot, the first 1 in both conventions; γ None is all ones."""
    if gamma is None:
        return jnp.ones((block_size,), jnp.float32)
    order = jnp.maximum(jnp.arange(block_size) - first_slot, 0)
    return jnp.exp(-order.astype(jnp.float32) / gamma)


def head_tokens(
    tokens: Tokens, anchors: jax.Array, drafts: int, extra_slots: int = 0, positions: jax.Array | None = None
) -> jax.Array:
    """int32 [B, A, T]: the tokens before the slots that the head sees, x[a-extra_slots..a+M-1], clamped to the row.

    positions: int32 [B, S] of packed rows, from 0 in each document. Before its first token a document repeats that
    token, so no token of another document is read.
    """
    places = slot_positions(anchors - extra_slots, extra_slots + drafts)
    if extra_slots and positions is not None:
        places = jnp.maximum(places, (anchors - jnp.take_along_axis(positions, anchors, axis=1))[:, :, None])
    return gather_positions(tokens, places)
