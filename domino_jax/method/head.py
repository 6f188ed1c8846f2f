"""What all heads have in common: a sequential correction of low rank to the backbone's logits."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.method.config import DrafterConfig
from domino_jax.models.layers import INIT_STD, Linear, Matrix, in_use, multiply
from domino_jax.models.quantized import is_quantized, transposed
from domino_jax.models.shapes import Hidden
from domino_jax.models.sharding import constrain


class Head(nn.Module):
    """Logits of a slot = base logits + code · matrix. The code [..., E] follows from the slot's z, from the token
    before the slot, and from a state over all tokens before that one.

    A head is one file with a subclass that defines `setup`, where `up` is `last_matrix()`, and the methods that raise
    here; one with a state also `initial_state` and `step`. They see T slots: those that predict a token, and before
    them `DrafterConfig.lead` others. Of a token they get x: its target embedding [..., D] where
    `DrafterConfig.reads_embeddings`, else its id, int32 [...].

    Training calls `codes` for whole blocks and `residual` for slices of them. Drafting calls `hidden_half` for a whole
    block at first, and then `step` for one slot at a time, a chain with arrays [B, ...], a tree with lanes,
    [B, W, ...]; or `codes_after` once per pass (`DrafterConfig.head_passes`). With few candidates, `residual_of`
    replaces `residual`.

    reads_ahead: the head also has `reading`, a product with x alone, and `advance`, the rest of `step`. With few
    candidates of a slot a chain calls `reading` once, for all of them.
    """

    reads_ahead = False

    config: DrafterConfig
    dtype: Any = jnp.float32
    whole: bool = False  # decoding on a mesh: every device computes all of it

    def initial_state(self, *batch: int) -> Any:
        """The state before any token: a tree of float32 arrays [*batch, ...], () for a head without a state."""
        return ()

    def hidden_half(self, z: Hidden) -> jax.Array:
        """What z [B, T, D] of a block alone determines of the codes, for each slot one array: [B, T, any]."""
        raise NotImplementedError

    def step(self, state: Any, x: jax.Array, half: jax.Array) -> tuple[Any, jax.Array]:
        """State, the token before the slot, and the slot's half → (the state after that token, code [..., E])."""
        return state, self.codes_after(half, x)

    def codes_after(self, half: jax.Array, x: jax.Array) -> jax.Array:
        """Codes [B, t, E] of the first t slots at once, from their halves and x [B, t, ...], the tokens before them.

        They equal those of t steps.
        """
        raise NotImplementedError

    def codes(self, z: Hidden, x: jax.Array) -> jax.Array:
        """`codes_after` from z [B, T, D] of a block."""
        return self.codes_after(self.hidden_half(z), x)

    def last_matrix(self, **choices: Any) -> Linear:
        """The matrix [E, N], stored as the parameter up/kernel; choices: of Linear.

        N is V; in decoding with a draft vocabulary, its size.
        """
        columns = len(self.config.draft_tokens) or self.config.vocab_size
        return Linear(columns, dtype=self.dtype, whole=self.whole, logits=True, **choices)

    def token_table(self, rank: int) -> nn.Embed:
        """A table [V, rank] for `look_up`, stored as the parameter predecessor/embedding."""
        init = nn.initializers.normal(INIT_STD)
        return nn.Embed(self.config.vocab_size, rank, dtype=self.dtype, embedding_init=init)

    def look_up(self, tokens: jax.Array) -> jax.Array:
        """Rows [..., rank] of the table `predecessor`."""
        rows = self.predecessor(tokens)
        if self.whole:
            return rows
        # On a mesh in two steps, as the target's embeddings: each device looks up its share of the rank first.
        rows = constrain(rows, "groups", *[None] * (rows.ndim - 2), "width")
        return constrain(rows, "batch")

    def residual(self, code: jax.Array) -> jax.Array:
        """Codes [..., E] → the correction of all logits, float32 [..., N]."""
        by_rows = not self.is_initializing() and "rows" in self.up.variables["params"]
        return multiply(code.astype(self.dtype), self._last_kernel(), logits=True) if by_rows else self.up(code)

    def _last_kernel(self) -> Matrix:
        """The matrix [E, N], however it is stored (drafter.rows_together)."""
        stored = self.up.variables["params"]
        if "rows" not in stored:
            return in_use(stored["kernel"], None if self.whole else "up", self.dtype)
        return transposed(in_use(stored["rows"], None, self.dtype))

    def rows(self, columns: jax.Array) -> jax.Array:
        """`columns` [..., Q] of the matrix as rows [..., Q, E]: all that `residual_of` reads of it."""
        kernel = self._last_kernel()
        if not is_quantized(kernel):
            return jnp.take(kernel.T, columns, axis=0)
        scale = jnp.take(kernel["scale"][0], columns)
        rows = jnp.take(kernel["q"].T, columns, axis=0).astype(jnp.float32)
        return (rows * scale[..., None]).astype(self.dtype)

    def residual_of(self, code: jax.Array, rows: jax.Array) -> jax.Array:
        """As `residual`, for a few tokens: codes [..., W, E], their `rows` [..., Q, E] → float32 [..., W, Q]."""
        return jnp.einsum("...we,...qe->...wq", code, rows, preferred_element_type=jnp.float32)


class SplitLinear(nn.Module):
    """One kernel [sum of widths, features] over joined inputs, applied part by part: what does not depend on tokens can
    leave a loop."""

    widths: tuple[int, ...]
    features: int
    dtype: Any = jnp.float32
    use_bias: bool = False

    def setup(self):
        shape = (sum(self.widths), self.features)
        self.kernel = self.param("kernel", nn.initializers.normal(INIT_STD), shape)
        if self.use_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (self.features,))

    def part(self, index: int, x: jax.Array, bias: bool = False) -> jax.Array:
        """The share of input `index`, x [..., widths[index]] → [..., features], with the bias if wanted."""
        # Cast before it is gathered: two bytes a weight, not four, travel between devices in a bfloat16 step.
        product = multiply(x.astype(self.dtype), self._rows(in_use(self.kernel, self.name, self.dtype), index))
        return product + self.bias.astype(product.dtype) if bias else product

    def matrix(self, index: int) -> Matrix:
        """The rows of input `index` [widths[index], features], fetched once for a loop, so that their gradient is
        summed once, in float32."""
        return self._rows(in_use(self.kernel, self.name), index)

    def _rows(self, kernel: Matrix, index: int) -> Matrix:
        start = sum(self.widths[:index])
        rows = slice(start, start + self.widths[index])
        return {**kernel, "q": kernel["q"][rows]} if is_quantized(kernel) else kernel[rows]
