"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts a chain, a token for each pass through it, and its loss.

Row t holds a state g and the token after it, x[t+1]. At rows of text g is fused from three depths of the target. At a
drafted row it is what the layer returned for the row before, normed with norm_output. Training imitates that
(training-time test): the layer runs several times over all rows, each time with the states of the run before and with
tokens one place later.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from domino_jax.method.losses import Labels, Outputs
from domino_jax.method.pair import Pair, TargetRows
from domino_jax.method.sliced_loss import SlicedForward, Sums
from domino_jax.models import attention
from domino_jax.models.attention import causal_mask
from domino_jax.models.cache import LayerCache, append, init_cache
from domino_jax.models.decoder_layer import Angles, Attention, SelfAttention, cache_attention
from domino_jax.models.layers import Linear, RMSNorm, SwiGLU, rotary_angles, with_kernel_in_use
from domino_jax.models.shapes import MASKED, Features, Hidden, Lengths, Logits, Positions
from domino_jax.models.sharding import constrain
from domino_jax.runtime.keys import key

State = tuple[LayerCache, jax.Array]  # keys and values of all rows but the last; the last row's fused features [B, D]

SLICE_LOGITS = 512  # rows of logits of one text that are in memory at once, as of 32 blocks of 16 slots


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the token's embedding and the state.

    Its residual is the state, normed as attention reads it with norm_before_residual.
    """

    config: Any
    dtype: Any = jnp.float32

    def setup(self):
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
        self.hidden_norm = RMSNorm(c.rms_norm_eps, self.dtype)
        heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        self.self_attn = SelfAttention(c.hidden_size, *heads, c.rms_norm_eps, dtype=self.dtype, qk_norm=False)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps, self.dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, self.dtype)

    def _inputs(self, x: jax.Array, g: jax.Array) -> jax.Array:
        return jnp.concatenate([self.input_layernorm(x), self.hidden_norm(g)], axis=-1)

    def keys_values(self, x: jax.Array, g: jax.Array, angles: Angles) -> LayerCache:
        return self.self_attn.keys_values(self._inputs(x, g), angles)

    def __call__(self, x: jax.Array, g: jax.Array, angles: Angles, over: Attention) -> tuple[jax.Array, Any]:
        """Embeddings x and states g [B, T, D] → (the rows' next states, the second result of `over`)."""
        attended, extra = self.self_attn(self._inputs(x, g), angles, over)
        g = self.hidden_norm(g) if self.config.norm_before_residual else g
        g = constrain(g + attended, "batch")
        return constrain(g + self.mlp(self.post_attention_layernorm(g)), "batch"), extra


class Eagle3(nn.Module):
    """fc fuses the tapped features; one layer; a norm and an lm_head over the draft vocabulary."""

    config: Any
    dtype: Any = jnp.float32
    remat: bool = False  # training: a pass through the layer is computed again in the backward pass

    def setup(self):
        c = self.config
        # The attention function is no array; everything it closes over may be.
        layer = nn.remat(Eagle3Layer, static_argnums=(4,)) if self.remat else Eagle3Layer
        if c.norm_before_fc:
            self.input_norm = RMSNorm(c.rms_norm_eps, self.dtype)
        self.fc = Linear(c.hidden_size, dtype=self.dtype)
        self.midlayer = layer(c, self.dtype)
        self.norm = RMSNorm(c.rms_norm_eps, self.dtype)
        self.lm_head = Linear(c.draft_vocab_size, dtype=self.dtype, logits=True)

    # ------------------------------------------------------------------------------------------------ training

    def __call__(
        self,
        features: Features,
        embedded: jax.Array,
        passes: int,
        positions: Positions | None = None,
        documents: jax.Array | None = None,
    ) -> jax.Array:
        """The states [B, S, J, D] of J passes over all rows; `logits` makes their predictions.

        In pass j row t reads the token at t+1+j, and predicts the one after that.

        Args:
            features: [B, S, C·D].  embedded: of the row's tokens and of `passes` more, [B, S+J, D].
            positions, documents: int32 [B, S] of packed rows.
        """
        length = features.shape[1]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length), features.shape[:2])
        state = constrain(self._fused(features), "batch")
        earlier, states = [], []
        for index in range(passes):

            def over_passes(q, k, v, earlier=tuple(earlier)):
                read = (*earlier, (k, v))
                return attend_passes(q, read, documents, self.config.sliding_window), (k, v)

            x = embedded[:, 1 + index : 1 + index + length]
            out, rows = self.midlayer(x, state, self._angles(positions + index), over_passes)
            state = self._fed_back(out)
            earlier.append(rows)
            states.append(out)
        out = jnp.stack(states, axis=2)
        if self.is_initializing():
            self.logits(out)
        return out

    def logits(self, states: jax.Array) -> Logits:
        """States [..., D] → float32 logits [..., V_d] over the draft vocabulary."""
        return self.lm_head(self.norm(states))

    def example(self) -> tuple:
        """A pass for `init` to trace."""
        c = self.config
        return jnp.zeros((1, 2, 3 * c.hidden_size)), jnp.zeros((1, 3, c.hidden_size)), 1

    # ------------------------------------------------------------------------------------------------ decoding

    def init_cache(self, batch: int, slots: int) -> State:
        c = self.config
        [rows] = init_cache(1, batch, slots, c.num_key_value_heads, c.head_dim, self.dtype)
        return rows, jnp.zeros((batch, c.hidden_size), self.dtype)

    def extend_context(self, cache: State, text: TargetRows, slots: jax.Array) -> State:
        """Writes the rows' keys and values at cache slots (= absolute positions) int32 [B, T].

        The row before the anchor may have another token here; `draft_step` writes it again.
        """
        fused = self._fused(text.features)
        rows = self.midlayer.keys_values(text.following, fused, self._angles(slots))
        return append(cache[0], *rows, slots), text.last(fused, cache[1])

    def draft_step(
        self, rows: LayerCache, state: jax.Array, x: jax.Array, slots: Lengths
    ) -> tuple[Logits, jax.Array, LayerCache]:
        """One row after those before `slots` int32 [B] (= its position) → (float32 logits [B, V_d], next state, rows).

        Args:
            state: [B, D], fused features for the row before the anchor, then what the step before returned.
            x: [B, D], the embedding of the token after the row: the anchor, then the last draft.
        """
        places = slots[:, None]
        keys = jnp.arange(rows[0].shape[2])
        mask = keys <= places[:, :, None]
        if self.config.sliding_window:
            mask &= keys > places[:, :, None] - self.config.sliding_window
        out, rows = self.midlayer(x[:, None], state[:, None], self._angles(places), cache_attention(rows, places, mask))
        return self.logits(out[:, 0]), self._fed_back(out[:, 0]), rows

    def _fused(self, features: Features) -> jax.Array:
        """Features [..., C·D] → states [..., D] of rows of text."""
        return self.fc(self.input_norm(features) if self.config.norm_before_fc else features)

    def _fed_back(self, out: jax.Array) -> jax.Array:
        """The layer's output → the state of the row after it."""
        return self.norm(out) if self.config.norm_output else out

    def _angles(self, positions: Positions) -> Angles:
        return rotary_angles(positions, self.config.head_dim, self.config.rope_theta)


def attend_passes(
    q: jax.Array,
    passes: tuple[LayerCache, ...],
    documents: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Attention of the last pass' queries [B, N, S, H] over keys and values [B, K, S, H] of all passes, one softmax.

    A query reads the first pass at its own row and before, and every later pass at its own row only, as a chain does
    that begins at this row. Queries go through in parts, whose scores are made again in the backward pass.

    Args:
        documents: int32 [B, S] of packed rows: rows of other documents are not read.
        window: how many rows of the first pass a query reads, its own included; None: all.

    >>> third pass, 3 rows  →  1 0 0   1 0 0   1 0 0
                               1 1 0   0 1 0   0 1 0
                               1 1 1   0 0 1   0 0 1
    """
    length = q.shape[2]
    size = attention.PART_ROWS * -(-length // (attention.PART_ROWS * attention.ROW_PARTS))

    def part(start: int) -> jax.Array:
        end = min(start + size, length)
        here = None if documents is None else documents[:, start:end]
        before = None if documents is None else documents[:, :end]
        mask = causal_mask(jnp.arange(start, end), end, here, before)
        if window:
            mask &= jnp.arange(end) > jnp.arange(start, end)[:, None] - window
        first = tuple(x[:, :, :end] for x in passes[0])
        later = [tuple(x[:, :, start:end] for x in rows) for rows in passes[1:]]
        return jax.checkpoint(_attend_part)(q[:, :, start:end], first, later, mask)

    return jnp.concatenate([part(start) for start in range(0, length, size)], axis=2)


def _attend_part(q: jax.Array, first: LayerCache, later: list[LayerCache], mask: jax.Array) -> jax.Array:
    """Queries [B, N, T, H] over `first` [B, K, S, H] with mask bool [1 or B, T, S], and row by row over `later`."""
    batch, heads, rows, width = q.shape
    kv = first[0].shape[1]
    q = q.reshape(batch, kv, heads // kv, rows, width)
    f32 = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("bkrth,bksh->bkrts", q, first[0], **f32)
    scores = [jnp.where(mask[:, None, None], scores, MASKED)]
    scores += [jnp.einsum("bkrth,bkth->bkrt", q, k, **f32)[..., None] for k, _ in later]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * width**-0.5, axis=-1).astype(q.dtype)
    keys = first[0].shape[2]
    out = jnp.einsum("bkrts,bksh->bkrth", weights[..., :keys], first[1], **f32)
    for index, (_, v) in enumerate(later):
        out += weights[..., keys + index, None].astype(jnp.float32) * v[:, :, None]
    return out.astype(q.dtype).reshape(batch, heads, rows, width)


# -------------------------------------------------------------------------------------------------------------- loss

# Arrays are [B, S, J, ...]: the S rows of a text take the place of the blocks of losses.py, and J passes the place of
# the slots. The same slices bound how many logits are in memory.


@dataclasses.dataclass(frozen=True)
class Eagle3Loss:
    """Per pass the cross-entropy to the target's distribution over the draft vocabulary, where the target's own choice
    is in it; over all positions of the batch; passes added up with their weights.

    passes: J.  decay: pass j counts decay^j.
    positions: of all rows of the step, supervised or not, as in the public trainers. A step sets it (`at`).
    """

    passes: int = key(7, least=1)
    decay: float = 0.8
    positions: int = 1

    reads_target = True  # its last hidden states

    @property
    def blocks_at_once(self) -> int:
        """Rows of each text whose logits are in memory at once."""
        return max(SLICE_LOGITS // (self.passes + 1), 1)

    @property
    def scale(self) -> jax.Array:
        """float32 [J], by which the sum of each pass' losses is multiplied."""
        return self.decay ** jnp.arange(self.passes, dtype=jnp.float32) / self.positions

    def at(self, _: jax.Array | float, labels: Labels) -> "Eagle3Loss":
        """The loss of a step with all of its labels. There is no λ."""
        rows, length, _ = labels.ids.shape
        return dataclasses.replace(self, positions=rows * length)

    def labels(self, batch: dict[str, jax.Array]) -> Labels:
        """Arrays [B, S, J] by the place s of the target's state that teaches: pass j at row s-1-j predicts the token at
        s+1, and counts where that token is supervised. In packed rows all of these places are in one document.
        """
        tokens = batch["tokens"]
        documents = batch.get("documents", jnp.ones_like(tokens))
        counts, document = shift((batch["loss_mask"] > 0.5).astype(jnp.float32), -1), shift(documents, -1)
        rows = [counts * (shift(documents, 1 + index) == document) for index in range(self.passes)]
        weights = jnp.stack(rows, axis=2) * (document > 0)[:, :, None]
        return Labels(jnp.broadcast_to(shift(tokens, -1)[:, :, None], weights.shape), weights, weights)

    def forward(self, models: Pair, features: Features, batch: dict[str, jax.Array], hidden: Hidden) -> SlicedForward:
        """The forward pass of a batch, with inputs (z [B, S, J, D],); features, hidden: as for step.drafter_loss."""
        gathered, tokens = models.with_gathered_head(), models.drafter.config.draft_tokens
        states = models.row_states(features, batch, self.passes)
        # Pass j has row s-1-j beside the target's state at s, which teaches it.
        z = jnp.stack([shift(states[:, :, index], 1 + index) for index in range(states.shape[2])], axis=2)

        def outputs_of(params, z, hidden):
            logits, target = models.replace(drafter_params=params).bound.logits(z), gathered.unembed(hidden)
            teacher, choice = target, jnp.argmax(target, axis=-1)
            if len(tokens):
                places = jnp.full(target.shape[-1], -1).at[tokens].set(jnp.arange(len(tokens)))
                teacher, choice = target[..., jnp.asarray(tokens)], places[choice]
            return Outputs(logits, None, target, (teacher, choice))

        params = {name: models.drafter_params[name] for name in ("norm", "lm_head")}
        in_use = functools.partial(with_kernel_in_use, module="lm_head", dtype=models.drafter.dtype)
        return SlicedForward(outputs_of, params, (z,), hidden, in_use)

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        """As Loss.block_sums, [J] each. outputs.extra: the target's logits over the draft vocabulary [n, V_d], and the
        place of its choice in there, int32 [n], -1 where it is not."""
        log_q, weights, (teacher, choice) = jax.nn.log_softmax(outputs.base), labels.mask, outputs.extra
        log_p = teacher - jax.nn.logsumexp(outputs.target, axis=-1, keepdims=True)
        taught = weights * (choice >= 0)[:, None]
        losses = -jnp.einsum("sv,sjv->sj", jax.nn.softmax(teacher, axis=-1), log_q)
        overlap = jnp.minimum(jnp.exp(log_q), jnp.exp(log_p)[:, None]).sum(-1)
        correct = jnp.argmax(outputs.base, axis=-1) == choice[:, None]
        return {
            "losses": (taught * losses).sum(0),
            "correct": (weights * correct).sum(0),
            "labels": weights.sum(0),
            "overlap": (taught * overlap).sum(0),
            "taught": taught.sum(0),
        }

    def total(self, sums: Sums) -> jax.Array:
        return jnp.sum(self.scale * sums["losses"], axis=-1)

    def metrics(self, sums: Sums) -> dict[str, jax.Array]:
        """The metrics of the step: "loss", "accuracy" over all passes, "accept_len"; of each pass "loss_1", … (before
        its weight), "accuracy_1", … and "acceptance_1", ….

        accept_len is 1 + Σ_j Π_{i≤j} (accuracy of pass i), as if the passes were right independently of each other.
        """
        accuracies = sums["correct"] / jnp.maximum(sums["labels"], 1.0)
        by_pass = {
            "loss": sums["losses"] / self.positions,
            "accuracy": accuracies,
            "acceptance": sums["overlap"] / jnp.maximum(sums["taught"], 1.0),
        }
        return {
            "loss": self.total(sums),
            "accuracy": sums["correct"].sum() / jnp.maximum(sums["labels"].sum(), 1.0),
            "accept_len": 1.0 + jnp.cumprod(accuracies).sum(),
            **{f"{name}_{j + 1}": values[j] for name, values in by_pass.items() for j in range(self.passes)},
        }


def shift(x: jax.Array, by: int) -> jax.Array:
    """x [B, S, ...] moved `by` places along S, to later ones where by > 0; zeros move in."""
    size = min(abs(by), x.shape[1])
    ends = (size, 0) if by > 0 else (0, size)
    rest = x[:, : x.shape[1] - size] if by > 0 else x[:, size:]
    return jnp.pad(rest, [(0, 0), ends, *[(0, 0)] * (x.ndim - 2)])
