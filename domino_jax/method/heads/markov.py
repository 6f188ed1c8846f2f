"""The Markov heads of DSpark: a correction that follows from the token before a slot, and a confidence in each slot.

A token's row v of a table [V, E] is the code itself (vanilla), or is gated by the slot's z (gated), or goes through a
small recurrence over the block (rnn). Source of the formulas: DSpark as SpecForge and DeepSpec publish it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from domino_jax.method.head import Head, SplitLinear, cut_ranks
from domino_jax.method.names import GATED, RNN, VANILLA
from domino_jax.models.layers import with_rows
from domino_jax.models.shapes import Hidden


class MarkovHead(Head):
    """Code of a slot, with v the table's row of the token before it. It reads token ids.

    vanilla: v.
    gated: σ(G·[z ; v] + g) ⊙ v.
    rnn: tanh(o) of p, c, o = J·[s ; v ; z] + j; after the slot s ← σ(p) ⊙ s + (1 - σ(p)) ⊙ tanh(c), s = 0 at first.
    """

    def setup(self):
        c = self.config
        width, rank = c.hidden_size, c.markov_rank
        self.predecessor = self.token_table(rank)
        self.up = self.last_matrix()
        if c.markov_head_type == GATED:
            self.gate = SplitLinear((width, rank), rank, self.dtype, use_bias=True)
        if c.markov_head_type == RNN:
            self.joint = SplitLinear((rank, rank, width), 3 * rank, self.dtype, use_bias=True)
        if c.enable_confidence_head:
            widths = (width, rank) if c.confidence_head_with_markov else (width,)
            self.confidence_proj = SplitLinear(widths, 1, self.dtype, use_bias=True)

    def initial_state(self, *batch: int) -> Any:
        """s = 0, float32 [*batch, E], of rnn; () of the others."""
        c = self.config
        return jnp.zeros((*batch, c.markov_rank), jnp.float32) if c.markov_head_type == RNN else ()

    def hidden_half(self, z: Hidden) -> jax.Array:
        """z's share of the gate [..., E] or of p, c and o [..., 3E]; nothing [..., 0] of vanilla."""
        kind = self.config.markov_head_type
        if kind == VANILLA:
            return z[..., :0]
        return self.gate.part(0, z, bias=True) if kind == GATED else self.joint.part(2, z, bias=True)

    def step(self, state: Any, x: jax.Array, half: jax.Array) -> tuple[Any, jax.Array]:
        v = self.look_up(x)
        if self.config.markov_head_type != RNN:
            return state, self._gated(v, half)
        state, code = self._recur(state, half + self.joint.part(1, v), self.joint.matrix(0))
        return jax.lax.optimization_barrier(state), code  # as in the Domino head

    def codes(self, z: Hidden, x: jax.Array, kept: jax.Array | None = None) -> jax.Array:
        if self.is_initializing() and self.config.enable_confidence_head:
            self.confidence(z, x)
        half, v = self.hidden_half(z), cut_ranks(self.look_up(x), kept)
        if self.config.markov_head_type != RNN:
            return self._gated(v, half)
        shares = half + self.joint.part(1, v)
        start, matrix = self.initial_state(len(x)), self.joint.matrix(0)
        kept = None if kept is None else kept[:, 0]

        def recur(state, share):
            return tuple(cut_ranks(values, kept) for values in self._recur(state, share, matrix))

        return jax.lax.scan(recur, start, shares.swapaxes(0, 1))[1].swapaxes(0, 1)

    def confidence(self, z: Hidden, x: jax.Array, kept: jax.Array | None = None) -> jax.Array:
        """Logits float32 [...] of a draft's chance to be accepted, given that those before it were.

        Args:
            z: [..., D] of the slots.  x: int32 [...], the tokens before them.  kept: bool [..., E] as of `codes`.
        """
        logit = self.confidence_proj.part(0, z, bias=True)
        if self.config.confidence_head_with_markov:
            logit += self.confidence_proj.part(1, cut_ranks(self.look_up(x), kept))
        return logit[..., 0].astype(jnp.float32)

    def _gated(self, v: jax.Array, half: jax.Array) -> jax.Array:
        """The code of vanilla, v [..., E] itself, and of gated."""
        if self.config.markov_head_type == VANILLA:
            return v
        return jax.nn.sigmoid(half + self.gate.part(1, v)) * v

    def _recur(self, state: jax.Array, share: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One slot of the recurrence: state float32 [..., E], what else goes into p, c and o [..., 3E]."""
        joined = share + with_rows(jnp.matmul, state.astype(self.dtype), matrix.astype(self.dtype))
        keep, new, out = jnp.split(joined.astype(jnp.float32), 3, axis=-1)
        keep = jax.nn.sigmoid(keep)
        return keep * state + (1.0 - keep) * jnp.tanh(new), jnp.tanh(out).astype(self.dtype)
