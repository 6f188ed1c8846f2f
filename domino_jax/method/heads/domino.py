"""The Domino head: a GRU over the chosen tokens and a low-rank residual on the logits."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.method.head import Head, SplitLinear, cut_ranks
from domino_jax.models.layers import with_rows
from domino_jax.models.shapes import Hidden
from domino_jax.models.sharding import gathered


class GRU(nn.Module):
    """torch's GRU without biases. Gate order reset, update, new; the reset gate acts AFTER the hidden product.

    flax's own GRU cells carry a bias and cannot express this, hence the cell by hand.
    """

    width: int  # D
    state: int  # U
    dtype: Any = jnp.float32

    def setup(self):
        bound = self.state**-0.5  # torch's default: uniform ±1/sqrt(U)

        def init(key, shape, dtype=jnp.float32):
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        self.weight_ih = self.param("weight_ih", init, (self.width, 3 * self.state))
        self.weight_hh = self.param("weight_hh", init, (self.state, 3 * self.state))

    def input_gates(self, x: jax.Array) -> jax.Array:
        """x [..., D] → the input's share of the three gates [..., 3U]."""
        matrix = gathered(self.weight_ih.astype(self.dtype), "weight_ih")
        return with_rows(jnp.matmul, x.astype(self.dtype), matrix)

    def hidden_matrix(self) -> jax.Array:
        """The matrix [U, 3U] of `advance`, fetched once for a loop, so that its gradient is summed once, in float32."""
        return gathered(self.weight_hh, "weight_hh")

    def advance(self, state: jax.Array, input_gates: jax.Array, matrix: jax.Array | None = None) -> jax.Array:
        """h' = (1-u)·n + u·h with r, u from both shares and n = tanh(W_n x + r·(U_n h)). state float32 [..., U].

        matrix: hidden_matrix(), when a loop has fetched it.
        """
        matrix = self.hidden_matrix() if matrix is None else matrix
        hidden_gates = with_rows(jnp.matmul, state.astype(self.dtype), matrix.astype(self.dtype))
        x_reset, x_update, x_new = jnp.split(input_gates.astype(jnp.float32), 3, axis=-1)
        h_reset, h_update, h_new = jnp.split(hidden_gates.astype(jnp.float32), 3, axis=-1)
        reset = jax.nn.sigmoid(x_reset + h_reset)
        update = jax.nn.sigmoid(x_update + h_update)
        new = jnp.tanh(x_new + reset * h_new)
        return (1.0 - update) * new + update * state


class DominoHead(Head):
    """Code silu(W1·[z ; h]), h the GRU state over the tokens chosen so far; it reads the target's embeddings."""

    def setup(self):
        c = self.config
        self.gru = GRU(c.hidden_size, c.gru_hidden_dim, self.dtype)
        self.down = SplitLinear((c.hidden_size, c.gru_hidden_dim), c.emb_dim, self.dtype)
        self.up = self.last_matrix()

    def initial_state(self, *batch: int) -> jax.Array:
        """h0 = 0, float32 [*batch, U]."""
        return jnp.zeros((*batch, self.config.gru_hidden_dim), jnp.float32)

    def hidden_half(self, z: Hidden) -> jax.Array:
        """z [..., D] → its share of W1's product [..., E]."""
        return self.down.part(0, z)

    def step(self, state: jax.Array, x: jax.Array, half: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Without the barrier the compiler for GPUs computes all earlier states again from their gates in every step of
        # an unrolled loop: 0.15 GB of 0.71 that a head of 64 candidates moved at Qwen3-8B.
        state = jax.lax.optimization_barrier(self.gru.advance(state, self.gru.input_gates(x)))
        return state, self._code(half, state)

    def codes(self, z: Hidden, x: jax.Array, kept: jax.Array | None = None) -> jax.Array:
        return cut_ranks(self._code(self.hidden_half(z), self.prefix_states(x)), kept)

    def prefix_states(self, x: jax.Array) -> jax.Array:
        """Embeddings [B, T, D] → states float32 [B, T, U], entry t after rows 0..t."""
        gates = self.gru.input_gates(x).swapaxes(0, 1)
        start, matrix = self.initial_state(x.shape[0]), self.gru.hidden_matrix()

        def consume(state, gate):
            state = self.gru.advance(state, gate, matrix)
            return state, state

        return jax.lax.scan(consume, start, gates)[1].swapaxes(0, 1)

    def _code(self, half: jax.Array, state: jax.Array) -> jax.Array:
        return jax.nn.silu(half + self.down.part(1, state))
