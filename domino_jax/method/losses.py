"""The dual cross-entropy of Domino (arXiv 2605.29707), in the order of docs/method.md: cross-entropy, the weights of
slots, the loss, and its metrics.

A step reduces the logits of a few blocks at a time to the additive sums of `Loss.block_sums` (sliced_loss.py).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.method.blocks import position_decay
from domino_jax.method.sliced_loss import SlicedForward, Sums
from domino_jax.models.shapes import Hidden, Logits
from domino_jax.models.slices import BLOCKS

# Guards against an empty batch, as in the public trainers: a block with a label weighs about 1, so 1e-6 moves nothing.
EPSILON = 1e-6


def cross_entropy(logits: Logits, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[labels], float32 [...]; logits [..., V], labels int32 [...]."""
    logits = logits.astype(jnp.float32)
    # A sum over a mask and no gather: that one would collect the vocabulary of all tensor shards first.
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def total_variation(logits: Logits, target_logits: Logits) -> jax.Array:
    """½ Σ_v |p - q|, float32 [...], from draft and target logits [..., V]: 1 minus the chance that a draw from q is
    accepted. Source: the L1 term of DSpark's loss, halved."""
    q, p = jax.nn.softmax(logits.astype(jnp.float32)), jax.nn.softmax(target_logits.astype(jnp.float32))
    return 0.5 * jnp.sum(jnp.abs(p - q), axis=-1)


# ------------------------------------------------------------------------------------------------------------- weights


def weigh_slots(mask: jax.Array, config: Any, loss: "Loss") -> jax.Array:
    """The weight of each slot [..., G], by whose sum the losses are divided: 1 where it has a label, times the decay
    over the slots of a block unless the loss `divides_by_labels`."""
    if loss.divides_by_labels:
        return mask
    return mask * position_decay(config.block_size, config.first_slot, loss.gamma)


def dpace_weights(losses: jax.Array, mask: jax.Array, alpha: float) -> jax.Array:
    """D-PACE slot weights [..., G] (arXiv 2605.18810).

    q = exp(-CE), smoothed to (1-α)q + α and 1 on slots without a label; c_k = ∏_{j≤k} q_j; weight_k = Σ_{i≥k} c_i·w0_i:
    what slot k is worth to the expected accepted length. No gradient flows through it.
    """
    confidence = jnp.exp(-jax.lax.stop_gradient(losses))
    smoothed = jnp.where(mask > 0, (1.0 - alpha) * confidence + alpha, 1.0)
    reached = jnp.cumprod(smoothed, axis=-1) * mask
    return jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)


class Labels(NamedTuple):
    """Labels that the blocks of a batch are trained to predict.

    ids: int32 [B, A, G].  mask: float32 [B, A, G], 1 where the slot has a label.  slot_weights: the same with
    the decay (`weigh_slots`).
    """

    ids: jax.Array
    mask: jax.Array
    slot_weights: jax.Array

    @property
    def of_blocks(self) -> jax.Array:
        """bool [..., n]: whether a block has a label."""
        return self.mask.max(-1) > 0

    @property
    def divisor(self) -> jax.Array:
        """The sum of the loss weights, float32 scalar.

        By slots, whose labels are counted exactly: one accumulator of XLA:CPU gave 4e-6 too much for 1,024 weights.
        """
        blocks = tuple(range(self.mask.ndim - 1))
        return jnp.sum(self.mask.sum(blocks) * self.slot_weights.max(blocks))


# ------------------------------------------------------------------------------------------------------------ the loss


class Outputs(NamedTuple):
    """Logits of the blocks of a slice, arrays [..., n, G, ...].

    base, final: logits float32 [..., V].
    target: the target's logits [..., V] from which it would predict each label; None where the loss does not read them.
    extra: what else the loss of a head reads, a tree.
    """

    base: Logits
    final: Logits
    target: Logits | None = None
    extra: Any = None


def accepted_lengths(correct: jax.Array, mask: jax.Array) -> jax.Array:
    """1 + Σ_k valid_k · ∏_{j≤k} (correct_j or not valid_j): float32 [...] from two [..., G] arrays.

    Slots without a label neither break a run nor count.
    """
    valid = mask > 0
    running = jnp.cumprod((correct | ~valid).astype(jnp.float32), axis=-1)
    return 1.0 + jnp.sum(running * valid, axis=-1)


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of Domino, (1-λ)·final + λ·base, with its choices from the recipe. Losses of other heads are subclasses.

    gamma: decay constant γ of the slot weights; None turns decay off.
    contiguous: the labels of a block end at the first unsupervised token.
    dpace_alpha: smoothing α of D-PACE weights, which then replace the decay; None is off.
    slice_blocks: anchor blocks of a row whose logits are in memory at once.
    frozen_backbone: no gradient enters the backbone.
    lambda_base: λ.  weight: of all labels of the step, which divides the losses. A step sets both (`at`).
    """

    gamma: float | None = 7.0
    contiguous: bool = True
    dpace_alpha: float | None = None
    slice_blocks: int = BLOCKS
    frozen_backbone: bool = False
    lambda_base: jax.Array | float = 0.0
    divisor: jax.Array | float = 1.0

    reads_target = False  # whether it compares with the target's own logits
    mixes = True  # the losses of backbone and head, by λ
    # {metric: (a sum, the sum that divides it)}. accept_len counts the bonus token.
    figures = {
        "final_loss": ("final_loss", "divisor"),
        "base_loss": ("base_loss", "divisor"),
        "accuracy": ("final_correct", "labels"),
        "base_accuracy": ("base_correct", "labels"),
        "accept_len": ("final_accepted", "blocks"),
        "base_accept_len": ("base_accepted", "blocks"),
    }

    @property
    def divides_by_labels(self) -> bool:
        """Whether it weights each slot by itself, as D-PACE does, and divides by the number of labels."""
        return self.dpace_alpha is not None

    @property
    def blocks_at_once(self) -> int:
        """slice_blocks, or fewer for a loss with more logits of each block."""
        return self.slice_blocks

    def at(self, lambda_base: jax.Array | float, labels: Labels) -> "Loss":
        """The loss of a step with all of its labels, which are known before any forward pass."""
        return dataclasses.replace(self, lambda_base=lambda_base, divisor=labels.divisor)

    def forward(
        self,
        default: SlicedForward,
        models: Any,
        base_logits: Callable[[Hidden], Logits],
        labels: Labels,
        previous_tokens: jax.Array,
    ) -> SlicedForward:
        """The forward pass of a batch, which the loss of another head may change.

        Args:
            default: of Domino, with inputs (z [B, A, G, D], codes [B, A, M, E] or None) and the head's parameters.
            models: pair.Pair.  base_logits: z → base logits.
            previous_tokens: int32 [B, A, T], the tokens before the slots that the head sees.
        """
        return default

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        """Additive sums of one row's slice, arrays [n, G, ...] → scalars.

        Numerators and denominators only, so that slices, devices and micro-batches add up to the whole.
        """
        base, final = (self.logit_sums(logits, labels) for logits in (outputs.base, outputs.final))
        named = {f"base_{name}": value for name, value in base.items()}
        return label_sums(labels) | named | {f"final_{name}": value for name, value in final.items()}

    def logit_sums(self, logits: Logits, labels: Labels) -> Sums:
        """The terms that logits [n, G, V] add to the sums."""
        losses, correct = cross_entropy(logits, labels.ids), jnp.argmax(logits, axis=-1) == labels.ids
        lengths = accepted_lengths(correct, labels.mask)
        return {
            "loss": jnp.sum(self.weights_of(losses, labels) * losses),
            "correct": jnp.sum(labels.mask * correct),
            "accepted": jnp.sum(lengths * labels.of_blocks),
        }

    def weights_of(self, losses: jax.Array, labels: Labels) -> jax.Array:
        """The weights of slots with these losses, [n, G] both."""
        if self.dpace_alpha is None:
            return labels.slot_weights
        return labels.slot_weights * dpace_weights(losses, labels.mask, self.dpace_alpha)

    def total(self, sums: Sums) -> jax.Array:
        """The scalar to minimise, of sums of any part of the step's blocks: additive over slices and micro-batches."""
        mixed = (1.0 - self.lambda_base) * sums["final_loss"] + self.lambda_base * sums["base_loss"]
        return mixed / (self.divisor + EPSILON)

    def metrics(self, sums: Sums) -> dict[str, jax.Array]:
        """The metrics of a step from the sums of all its blocks: the loss, λ and `figures`, of sums that there are."""
        metrics = {"loss": self.total(sums)}
        if self.mixes:
            metrics["lambda_base"] = jnp.asarray(self.lambda_base, jnp.float32)
        ratios = {name: ratio for name, ratio in self.figures.items() if ratio[0] in sums}
        return metrics | {name: sums[key] / jnp.maximum(sums[by], EPSILON) for name, (key, by) in ratios.items()}


def label_sums(labels: Labels) -> Sums:
    """Counts the blocks of a slice that have labels, and the labels, and sums their weights."""
    blocks = jnp.sum(labels.of_blocks).astype(jnp.float32)
    return {"blocks": blocks, "labels": labels.mask.sum(), "divisor": labels.divisor}
