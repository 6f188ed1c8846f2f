"""What EAGLE-3 learns from every row of a text (training-time test).

Arrays are [B, S, J, ...]: the S rows of a text take the place of the blocks of losses.py, and J passes that of the
slots. The same slices bound how many logits are in memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from domino_jax.method.losses import Labels, Outputs
from domino_jax.method.pair import Pair
from domino_jax.method.sliced_loss import SlicedForward, Sums, sliced_loss
from domino_jax.models.shapes import Features, Hidden
from domino_jax.runtime.keys import key

SLICE_LOGITS = 512  # rows of logits of one text that are in memory at once, as of 32 blocks of 16 slots


@dataclasses.dataclass(frozen=True)
class Eagle3Settings:
    """Choices of the training-time test.

    passes: J.  decay: pass j counts decay^j.
    """

    passes: int = key(7, least=1)
    decay: float = 0.8

    reads_target = True  # its last hidden states

    def labels(self, batch: dict[str, jax.Array]) -> Labels:
        """Arrays [B, S, J] by the place s of the target's state that teaches: pass j at row s-1-j predicts the token at
        s+1, and counts where that token is supervised. In packed rows all of these places are in one document.
        """
        tokens = batch["tokens"]
        documents = batch["documents"] if "documents" in batch else jnp.ones_like(tokens)
        counts, document = shift((batch["loss_mask"] > 0.5).astype(jnp.float32), -1), shift(documents, -1)
        rows = [counts * (shift(documents, 1 + index) == document) for index in range(self.passes)]
        weights = jnp.stack(rows, axis=2) * (document > 0)[:, :, None]
        return Labels(jnp.broadcast_to(shift(tokens, -1)[:, :, None], weights.shape), weights, weights)

    def objective(self, config: Any, labels: Labels) -> "Eagle3Objective":
        """The objective of the whole batch, whose labels are known before any forward pass."""
        decay = self.decay ** jnp.arange(self.passes, dtype=jnp.float32)
        # All positions, supervised or not, as in the public trainers.
        rows, length, _ = labels.ids.shape
        slice_blocks = max(SLICE_LOGITS // (self.passes + 1), 1)
        return Eagle3Objective(self, config, decay / (rows * length), slice_blocks)


def eagle3_states(models: Pair, features: Features, batch: dict[str, jax.Array], passes: int) -> jax.Array:
    """The states [B, S, J, D] of all passes; past the row its tokens are token 0."""
    embedded = models.embed(jnp.pad(batch["tokens"], ((0, 0), (0, passes))))
    packed = [batch[name] if name in batch else None for name in ("positions", "documents")]
    return models.bound(features, embedded, passes, *packed)


@dataclasses.dataclass(frozen=True)
class Eagle3Objective:
    """Per pass the cross-entropy to the target's distribution over the draft vocabulary, where the target's own choice
    is in it; over all positions of the batch; passes added up with their weights.

    config: of the drafter.
    scale: float32 [J], what the sum of a pass' losses is multiplied by.
    slice_blocks: rows of each text whose logits are in memory at once.
    """

    settings: Eagle3Settings
    config: Any
    scale: jax.Array
    slice_blocks: int

    def loss(self, sums: Sums) -> jax.Array:
        """The scalar to minimise, of sums of any part of the rows: additive over slices and micro-batches."""
        return jnp.sum(self.scale * sums["losses"], axis=-1)

    def forward(self, models: Pair, features: Features, batch: dict[str, jax.Array], hidden: Hidden) -> SlicedForward:
        """The forward pass of a batch, with inputs (z [B, S, J, D],); features, hidden: as for row_loss."""
        gathered = models.with_gathered_head()
        states = eagle3_states(models, features, batch, self.settings.passes)
        # Pass j has row s-1-j beside the target's state at s, which teaches it.
        z = jnp.stack([shift(states[:, :, index], 1 + index) for index in range(states.shape[2])], axis=2)

        def outputs_of(params, z, teacher):
            logits = models.replace(drafter_params=params).bound.logits(z)
            return Outputs(logits, None, gathered.unembed(teacher))

        params = {name: models.drafter_params[name] for name in ("norm", "lm_head")}
        return SlicedForward(outputs_of, params, (z,), hidden)

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        draft, target, weights = outputs.base, outputs.target, labels.label_weights
        choice = jnp.argmax(target, axis=-1)
        drafted, teacher, known = jnp.argmax(draft, axis=-1), target, jnp.ones(choice.shape, bool)
        if len(self.config.draft_tokens):
            tokens = jnp.asarray(self.config.draft_tokens)
            drafted, teacher = tokens[drafted], target[:, tokens]
            known = jnp.zeros(target.shape[-1], bool).at[tokens].set(True)[choice]
        log_q = jax.nn.log_softmax(draft, axis=-1)
        log_p = teacher - jax.nn.logsumexp(target, axis=-1, keepdims=True)
        taught = weights * known[:, None]
        losses = -jnp.einsum("sv,sjv->sj", jax.nn.softmax(teacher, axis=-1), log_q)
        overlap = jnp.minimum(jnp.exp(log_q), jnp.exp(log_p)[:, None]).sum(-1)
        return {
            "losses": (taught * losses).sum(0),
            "correct": (weights * (drafted == choice[:, None])).sum(0),
            "labels": weights.sum(0),
            "overlap": (taught * overlap).sum(0),
            "taught": taught.sum(0),
        }

    def metrics(self, sums: Sums) -> dict[str, jax.Array]:
        """The metrics of the step: "loss", "accuracy" over all passes, "accept_len"; of each pass "loss_1", … (before
        its weight), "accuracy_1", … and "acceptance_1", ….

        accept_len is 1 + Σ_j Π_{i≤j} (accuracy of pass i), as if the passes were right independently of each other.
        """
        accuracies = sums["correct"] / jnp.maximum(sums["labels"], 1.0)
        return {
            "loss": self.loss(sums),
            "accuracy": sums["correct"].sum() / jnp.maximum(sums["labels"].sum(), 1.0),
            "accept_len": 1.0 + jnp.cumprod(accuracies).sum(),
            **number_values("loss", self.scale[0] * sums["losses"]),
            **number_values("accuracy", accuracies),
            **number_values("acceptance", sums["overlap"] / jnp.maximum(sums["taught"], 1.0)),
        }


def row_loss(
    models: Pair,
    features: Features,
    batch: dict[str, jax.Array],
    labels: Labels,
    objective: Eagle3Objective,
    hidden: Hidden,
) -> tuple[jax.Array, Sums]:
    """The loss of a batch and its sums, through which no gradient flows.

    Args:
        features, hidden: of the target, [B, S, C·D] and [B, S, D] (after the final norm).
    """
    return sliced_loss(objective.forward(models, features, batch, hidden), labels, objective)


def shift(x: jax.Array, by: int) -> jax.Array:
    """x [B, S, ...] moved `by` places along S, to later ones where by > 0; zeros move in."""
    size = min(abs(by), x.shape[1])
    ends = (size, 0) if by > 0 else (0, size)
    rest = x[:, : x.shape[1] - size] if by > 0 else x[:, size:]
    return jnp.pad(rest, [(0, 0), ends, *[(0, 0)] * (x.ndim - 2)])


def number_values(name: str, values: jax.Array) -> dict[str, jax.Array]:
    """{"NAME_1": first, …}."""
    return {f"{name}_{index + 1}": values[index] for index in range(values.shape[0])}
