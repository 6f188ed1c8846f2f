"""What all heads have in common: a sequential correction of low rank to the backbone's logits."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.drafters.config import DrafterConfig
from domino_jax.models.layers import Linear
from domino_jax.models.shapes import Hidden


class Head(nn.Module):
    """Logits of a slot = base logits + code · matrix. The code [..., E] follows from the slot's z, from the token
    before the slot, and from a state over all tokens before that one.

    A head is one file with a subclass that defines `setup`, where `up` is `last_matrix()`, and the four methods that
    raise here. They see only the slots that predict a token (`DrafterConfig.num_drafts` of them, M). Of a token they
    get x: its target embedding [..., D] where `DrafterConfig.reads_embeddings`, else its id, int32 [...].

    Training calls `codes` for whole blocks and `residual` for slices of them. Drafting calls `hidden_half` before its
    loop and `step` for one slot at a time: a chain with arrays [B, ...], a tree with lanes, [B, W, ...]. With few
    candidates, `residual_of` replaces `residual`.
    """

    config: DrafterConfig
    dtype: Any = jnp.float32
    whole: bool = False  # decoding on a mesh: every device computes all of it

    def initial_state(self, *batch: int) -> Any:
        """The state before any token: a tree of float32 arrays [*batch, ...], () for a head without a state."""
        raise NotImplementedError

    def hidden_half(self, z: Hidden) -> jax.Array:
        """What a slot's z [..., D] alone determines of `step`, one array [..., any]."""
        raise NotImplementedError

    def step(self, state: Any, x: jax.Array, half: jax.Array) -> tuple[Any, jax.Array]:
        """State, the token before the slot, and the slot's half → (the state after that token, code [..., E])."""
        raise NotImplementedError

    def codes(self, z: Hidden, x: jax.Array) -> jax.Array:
        """Codes [B, T, E] of all slots at once, from z [B, T, D] and x [B, T, ...], the true tokens before the slots.

        They equal those of T steps.
        """
        raise NotImplementedError

    def last_matrix(self) -> Linear:
        """The matrix [E, V], stored as the parameter up/kernel."""
        return Linear(self.config.vocab_size, dtype=self.dtype, whole=self.whole, logits=True)

    def residual(self, code: jax.Array) -> jax.Array:
        """Codes [..., E] → the correction of all logits, float32 [..., V]."""
        return self.up(code)

    def rows(self, tokens: jax.Array) -> jax.Array:
        """Of the matrix transposed, the rows of tokens [..., Q] → [..., Q, E]: all that `residual_of` reads of it."""
        kernel = self.up.variables["params"]["kernel"].astype(self.dtype)
        return jnp.take(kernel.T, tokens, axis=0)

    def residual_of(self, code: jax.Array, rows: jax.Array) -> jax.Array:
        """As `residual`, for a few tokens: codes [..., W, E], their `rows` [..., Q, E] → float32 [..., W, Q]."""
        return jnp.einsum("...we,...qe->...wq", code, rows, preferred_element_type=jnp.float32)

    def __call__(self, z: Hidden, x: jax.Array) -> jax.Array:
        """The correction float32 [B, T, V] of all slots, with arguments as `codes`."""
        return self.residual(self.codes(z, x))
