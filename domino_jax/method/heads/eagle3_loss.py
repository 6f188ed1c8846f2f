"""The loss of EAGLE-3, which learns from every row of a text (training-time test).

Arrays are [B, S, J, ...]: the S rows of a text take the place of the blocks of losses.py, and J passes the place of the
slots. The same slices bound how many logits are in memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from domino_jax.method.losses import Labels, Outputs
from domino_jax.method.pair import Pair
from domino_jax.method.sliced_loss import SlicedForward, Sums
from domino_jax.models.layers import with_kernel_in_use
from domino_jax.models.shapes import Features, Hidden
from domino_jax.runtime.keys import key

SLICE_LOGITS = 512  # rows of logits of one text that are in memory at once, as of 32 blocks of 16 slots


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
