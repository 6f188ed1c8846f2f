"""The Domino head in plain JAX: a GRU over the chosen tokens and a low-rank correction of the logits.

Letters: B rows, M drafts of a round, D width, U GRU state, E rank, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Head(NamedTuple):
    """Matrices as [in, out]."""

    gates_x: jax.Array  # [D, 3U], the GRU's gates reset, update, new from the token
    gates_h: jax.Array  # [U, 3U], and from its state
    down_z: jax.Array  # [D, E], the part of W1 for the backbone's z
    down_h: jax.Array  # [U, E], and for the GRU's state
    up: jax.Array  # [E, V], W2


def advance(head: Head, state: jax.Array, x: jax.Array) -> jax.Array:
    """torch's GRU without biases: state float32 [B, U] after the token with embedding x [B, D]."""
    dtype = head.gates_x.dtype
    x_gates = jnp.matmul(x.astype(dtype), head.gates_x).astype(jnp.float32)
    h_gates = jnp.matmul(state.astype(dtype), head.gates_h).astype(jnp.float32)
    x_reset, x_update, x_new = jnp.split(x_gates, 3, axis=-1)
    h_reset, h_update, h_new = jnp.split(h_gates, 3, axis=-1)
    reset, update = jax.nn.sigmoid(x_reset + h_reset), jax.nn.sigmoid(x_update + h_update)
    new = jnp.tanh(x_new + reset * h_new)
    return (1.0 - update) * new + update * state


def roll_out(
    head: Head, embed: Callable[[jax.Array], jax.Array], base: jax.Array, z: jax.Array, anchors: jax.Array, prefix: int
) -> jax.Array:
    """Greedy drafts int32 [B, M]: the first `prefix` from base logits alone, the others corrected one after another.

    Args:
        embed: token ids [B] → the target's embeddings [B, D].
        base: [B, M, V], and z: [B, M, D], of the slots that predict.  anchors: int32 [B].
    """
    dtype = head.gates_x.dtype
    halves = jnp.matmul(z.astype(dtype), head.down_z)
    state = jnp.zeros((*anchors.shape, head.gates_h.shape[0]), jnp.float32)
    token, drafts = anchors, []
    # Unrolled: M is small, and the carry of a scan would have to keep one sharding.
    for slot in range(base.shape[1]):
        state = advance(head, state, embed(token))
        logits = base[:, slot].astype(jnp.float32)
        if slot >= prefix:
            code = jax.nn.silu(halves[:, slot] + jnp.matmul(state.astype(dtype), head.down_h))
            logits = logits + jnp.matmul(code, head.up, preferred_element_type=jnp.float32)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drafts.append(token)
    return jnp.stack(drafts, axis=1)
