"""The Domino head: a GRU over the chosen tokens and a low-rank residual on the logits. Its loss is in losses.py."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.method.config import LAMBDA_KEYS, DrafterConfig
from domino_jax.method.config_keys import refuse
from domino_jax.method.fields import LARGEST_RANK, field
from domino_jax.method.head import Head
from domino_jax.models.layers import Matrix, SplitLinear, in_loop, in_use, multiply
from domino_jax.models.shapes import Hidden


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
        return multiply(x.astype(self.dtype), in_use(self.weight_ih, "weight_ih", self.dtype))

    def hidden_matrix(self) -> Matrix:
        """The matrix [U, 3U] of `advance`, fetched once for a loop, so that its gradient is summed once, in float32."""
        return in_loop(self.weight_hh, "weight_hh", self.dtype)

    def advance(self, state: jax.Array, input_gates: jax.Array, matrix: Matrix | None = None) -> jax.Array:
        """h' = (1-u)·n + u·h with r, u from both shares and n = tanh(W_n x + r·(U_n h)). state float32 [..., U].

        matrix: hidden_matrix(), when a loop has fetched it.
        """
        matrix = self.hidden_matrix() if matrix is None else matrix
        hidden_gates = multiply(state.astype(self.dtype), matrix)
        x_reset, x_update, x_new = jnp.split(input_gates.astype(jnp.float32), 3, axis=-1)
        h_reset, h_update, h_new = jnp.split(hidden_gates.astype(jnp.float32), 3, axis=-1)
        reset = jax.nn.sigmoid(x_reset + h_reset)
        update = jax.nn.sigmoid(x_update + h_update)
        new = jnp.tanh(x_new + reset * h_new)
        return (1.0 - update) * new + update * state


class DominoHead(Head):
    """Code silu(W1·[z ; h]), h the GRU state over the tokens chosen so far; it reads the target's embeddings."""

    reads_ahead = True

    def setup(self):
        c = self.config
        self.gru = GRU(c.hidden_size, c.gru_hidden_dim, self.dtype)
        self.down = SplitLinear((c.hidden_size, c.gru_hidden_dim), c.emb_dim, self.dtype)
        self.up = self.last_matrix()

    def initial_state(self, *batch: int) -> jax.Array:
        """h0 = 0, float32 [*batch, U]."""
        return jnp.zeros((*batch, self.config.gru_hidden_dim), jnp.float32)

    def z_terms(self, z: Hidden) -> jax.Array:
        """z [..., D] → its share of W1's product [..., E]."""
        return self.down.part(0, z)

    def reading(self, x: jax.Array) -> jax.Array:
        """Embeddings [..., D] → their share of the GRU's gates [..., 3U]."""
        return self.gru.input_gates(x)

    def step(self, state: jax.Array, x: jax.Array, z_terms: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.advance(state, self.reading(x), z_terms)

    def advance(self, state: jax.Array, reading: jax.Array, z_terms: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Without the barrier the compiler for GPUs computes all earlier states again from their gates in every step of
        # an unrolled loop: 0.15 GB of 0.71 that a head of 64 candidates moved at Qwen3-8B.
        state = jax.lax.optimization_barrier(self.gru.advance(state, reading))
        return state, self._codes(z_terms, state)

    def codes(self, z_terms: jax.Array, x: jax.Array) -> jax.Array:
        return self._codes(z_terms, self.prefix_states(x))

    def prefix_states(self, x: jax.Array) -> jax.Array:
        """Embeddings [B, T, D] → states float32 [B, T, U], entry t after rows 0..t."""
        gates = self.gru.input_gates(x).swapaxes(0, 1)
        start, matrix = self.initial_state(x.shape[0]), self.gru.hidden_matrix()

        def consume(state, gate):
            state = self.gru.advance(state, gate, matrix)
            return state, state

        return jax.lax.scan(consume, start, gates)[1].swapaxes(0, 1)

    def _codes(self, z_terms: jax.Array, state: jax.Array) -> jax.Array:
        return jax.nn.silu(z_terms + self.down.part(1, state))


# ---------------------------------------------------------------------------------------------------------------- files


@dataclasses.dataclass(frozen=True)
class DominoConfig(DrafterConfig):
    """emb_dim: E, the rank of the correction.  gru_hidden_dim: U, the state of the GRU."""

    pure_draft_prefix_len: int = field(0, least=0)
    emb_dim: int = field(least=1, most=LARGEST_RANK, recipe=256, shape=True)
    gru_hidden_dim: int = field(like="emb_dim", least=1, most=LARGEST_RANK, recipe=1024, shape=True)

    head, title, paper = "domino", "Domino", " (arXiv 2605.29707)"
    known_by = ("domino", "causal_v5")  # the second is the projector_type of early checkpoints
    module, reads_embeddings = DominoHead, True
    tensor_names = DrafterConfig.tensor_names | {
        "head.gru.weight_ih": "prefix_gru.weight_ih_l0",
        "head.gru.weight_hh": "prefix_gru.weight_hh_l0",
        "head.down": "embed_proj.0",
        "head.up": "embed_proj.2",
    }
    reads = (*DrafterConfig.reads, "frozen_backbone", *LAMBDA_KEYS)
    new = {"shift_label": True, "pure_draft_prefix_len": 1}  # as in public drafters
    needed, own_keys = ("shift_label",), ("projector_type",)

    def head_keys(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"shift_label": self.shift_label, "projector_type": self.head, **self.head_fields()}

    def check(self) -> None:
        super().check()
        prefix, size = self.pure_draft_prefix_len, self.block_size
        refuse(
            self.suffix_start >= size,
            "pure_draft_prefix_len",
            f"pure_draft_prefix_len {prefix} leaves the head no slot of block_size {size}; lower it",
        )
