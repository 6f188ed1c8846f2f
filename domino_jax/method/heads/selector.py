"""DFlash2's candidate selector: how well each of a slot's likeliest tokens follows the token before it."""

import flax.linen as nn
import jax

from domino_jax.method.head import Head, cut_ranks
from domino_jax.models.layers import Linear
from domino_jax.models.shapes import Hidden


class Selector(Head):
    """Code A[y] ⊙ W_h z of the token y before the slot; it reads token ids and has no state.

    A is the predecessor codebook, the last matrix is the successor codebook, which starts as zeros, so that a new
    drafter begins as plain DFlash. Drafting and the selector's loss score `selector_top_k` candidates of a slot only,
    those with the largest base logits.
    """

    def setup(self):
        c = self.config
        self.predecessor = self.token_table(c.selector_rank)
        self.hidden_projection = Linear(c.selector_rank, dtype=self.dtype)
        self.up = self.last_matrix(kernel_init=nn.initializers.zeros)

    def initial_state(self, *batch: int) -> tuple:
        return ()

    def hidden_half(self, z: Hidden) -> jax.Array:
        """z [..., D] → W_h z [..., E]."""
        return self.hidden_projection(z)

    def step(self, state: tuple, x: jax.Array, half: jax.Array) -> tuple[tuple, jax.Array]:
        return (), self.look_up(x) * half

    def codes(self, z: Hidden, x: jax.Array, kept: jax.Array | None = None) -> jax.Array:
        return cut_ranks(self.step((), x, self.hidden_half(z))[1], kept)
