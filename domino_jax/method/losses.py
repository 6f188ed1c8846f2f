"""Losses reduced in slices of anchor blocks, and the dual cross-entropy of Domino (arXiv 2605.29707) with its metrics.

A slice is a few anchor blocks of every row. Its logits are made once, reduced to additive sums and to the gradient of
the loss, and dropped, so the [A·G, V] array of a batch never lives.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.method.blocks import position_decay
from domino_jax.models.shapes import Hidden, Logits
from domino_jax.models.slices import BLOCKS, cut, joined

# Guards against an empty batch, as in the public trainers: a block with a label weighs about 1, so 1e-6 moves nothing.
EPSILON = 1e-6

Sums = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Choices of the loss, from the recipe; the losses of other heads are subclasses, with choices of their own.

    gamma: decay constant γ of the slot weights; None turns decay off.
    contiguous: the labels of a block end at the first unsupervised token.
    dpace_alpha: smoothing α of D-PACE weights, which then replace the decay; None is off.
    slice_blocks: anchor blocks of a row whose logits are in memory at once.
    drafted_tokens: the head reads its own greedy drafts instead of the true tokens (rollout.greedy_tokens).
    frozen_backbone: no gradient enters the backbone.
    """

    gamma: float | None = 7.0
    contiguous: bool = True
    dpace_alpha: float | None = None
    slice_blocks: int = BLOCKS
    drafted_tokens: bool = False
    frozen_backbone: bool = False

    reads_target = False  # whether the loss compares with the target's own logits

    @property
    def divides_by_labels(self) -> bool:
        """Whether the loss weights each slot by itself, as D-PACE does, and divides by the number of labels."""
        return self.dpace_alpha is not None

    def objective(self, lambda_base: jax.Array, weight: jax.Array) -> "Objective":
        """What a step minimises; the arguments are Objective's."""
        return Objective(self, lambda_base, weight)


def cross_entropy(logits: Logits, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[labels], float32 [...]; logits [..., V], labels int32 [...]."""
    logits = logits.astype(jnp.float32)
    # A sum over a mask and no gather: that one would collect the vocabulary of all tensor shards first.
    is_label = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def total_variation(logits: Logits, target_logits: Logits) -> jax.Array:
    """½ Σ_v |p - q|, float32 [...], from draft and target logits [..., V]: 1 minus the chance that a
    draw from q is accepted.

    Source: the L1 term of DSpark's loss, halved.
    """
    q, p = jax.nn.softmax(logits.astype(jnp.float32)), jax.nn.softmax(target_logits.astype(jnp.float32))
    return 0.5 * jnp.sum(jnp.abs(p - q), axis=-1)


def accepted_lengths(correct: jax.Array, label_weights: jax.Array) -> jax.Array:
    """1 + Σ_k valid_k · ∏_{j≤k} (correct_j or not valid_j): float32 [...] from two [..., G] arrays.

    Slots without a label neither break a run nor count.
    """
    valid = label_weights > 0
    running = jnp.cumprod((correct | ~valid).astype(jnp.float32), axis=-1)
    return 1.0 + jnp.sum(running * valid, axis=-1)


def dpace_weights(losses: jax.Array, label_weights: jax.Array, alpha: float) -> jax.Array:
    """D-PACE slot weights [..., G] (arXiv 2605.18810).

    q = exp(-CE), smoothed to (1-α)q + α and 1 on slots without a label; c_k = ∏_{j≤k} q_j; weight_k = Σ_{i≥k} c_i·w0_i:
    what slot k is worth to the expected accepted length. No gradient flows through it.
    """
    confidence = jnp.exp(-jax.lax.stop_gradient(losses))
    smoothed = jnp.where(label_weights > 0, (1.0 - alpha) * confidence + alpha, 1.0)
    reached = jnp.cumprod(smoothed, axis=-1) * label_weights
    return jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)


def slot_weights(label_weights: jax.Array, config: Any, settings: LossSettings) -> jax.Array:
    """The weights [..., G] whose sum divides the losses: 1 per label, with the decay over the slots of a block.

    Where `settings.divides_by_labels` there is no decay here. The weights depend on labels and anchors alone, so their
    sum is known before any forward pass, over all micro-batches.
    """
    if settings.divides_by_labels:
        return label_weights
    return label_weights * position_decay(config.block_size, config.first_slot, settings.gamma)


class Labels(NamedTuple):
    """What the blocks of a batch are trained to predict, computed once per step.

    ids: int32 [B, A, G].  label_weights: float32 [B, A, G], 1 where the slot has a label.  loss_weights: the same with
    the decay (`slot_weights`).
    """

    ids: jax.Array
    label_weights: jax.Array
    loss_weights: jax.Array

    @property
    def weight(self) -> jax.Array:
        """The sum of the loss weights, float32 scalar.

        By slots, whose labels are counted exactly: XLA:CPU may add up thousands of weights in one accumulator, which
        was 4e-6 of the sum too much for 1,024 of them.
        """
        blocks = tuple(range(self.label_weights.ndim - 1))
        return jnp.sum(self.label_weights.sum(blocks) * self.loss_weights.max(blocks))


class Outputs(NamedTuple):
    """What the blocks of a slice give, arrays [..., n, G, ...].

    base, final: logits float32 [..., V].
    target: the target's logits [..., V] from which it would predict each label; None where the loss does not read them.
    extra: what else the loss of a head reads, a tree.
    """

    base: Logits
    final: Logits
    target: Logits | None = None
    extra: Any = None


class Parts(NamedTuple):
    """What `sliced_loss` cuts into slices.

    outputs_of: (params, *slice of inputs, slice of states) → Outputs [B, n, G, ...].
    params: the trained parameters that outputs_of reads.
    inputs: tuple of trees of arrays [B, A, ...], which depend on trained parameters.
    states: a tree of arrays [B, A, ...] or None, which do not.
    """

    outputs_of: Callable[..., Outputs]
    params: Any
    inputs: tuple
    states: Any = None


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a step minimises and reports: the loss of Domino, (1-λ)F + λG, or by a subclass the loss of another head.

    lambda_base: λ.  weight: of all labels of the step, which divides the losses; it is known before any forward pass.
    """

    settings: LossSettings
    lambda_base: jax.Array
    weight: jax.Array

    @property
    def slice_blocks(self) -> int:
        return self.settings.slice_blocks

    def parts(
        self, usual: Parts, models: Any, base_logits: Callable[[Hidden], Logits], labels: Labels, before: jax.Array
    ) -> Parts:
        """The forward pass of a batch, which the loss of another head may change.

        Args:
            usual: of Domino, with inputs (z [B, A, G, D], codes [B, A, M, E] or None) and the head's parameters.
            models: pair.Models.  base_logits: z → base logits.
            before: int32 [B, A, T], the tokens before the slots that the head sees.
        """
        return usual

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        """Additive sums of one row's slice, arrays [n, G, ...] → scalars.

        Numerators and denominators only, so that slices, devices and micro-batches add up to the whole.
        """
        label_weights = labels.label_weights
        has_label = label_weights.max(-1) > 0
        sums = {
            "blocks": jnp.sum(has_label).astype(jnp.float32),
            "labels": label_weights.sum(),
            "weight": labels.weight,
        }
        for prefix, logits in (("base_", outputs.base), ("final_", outputs.final)):
            losses = cross_entropy(logits, labels.ids)
            weights = labels.loss_weights
            if self.settings.dpace_alpha is not None:
                weights = weights * dpace_weights(losses, label_weights, self.settings.dpace_alpha)
            correct = jnp.argmax(logits, axis=-1) == labels.ids
            sums[prefix + "loss"] = jnp.sum(weights * losses)
            sums[prefix + "correct"] = jnp.sum(label_weights * correct)
            sums[prefix + "accepted"] = jnp.sum(accepted_lengths(correct, label_weights) * has_label)
        return sums

    def loss(self, sums: Sums) -> jax.Array:
        """The scalar to minimise, of sums of any part of the step's blocks: additive over slices and micro-batches."""
        mixed = (1.0 - self.lambda_base) * sums["final_loss"] + self.lambda_base * sums["base_loss"]
        return mixed / (self.weight + EPSILON)

    def metrics(self, sums: Sums) -> dict[str, jax.Array]:
        """The metrics of the step from the sums of all its blocks.

        Returns:
            {"loss", "final_loss", "base_loss", "accuracy", "base_accuracy", "accept_len", "base_accept_len",
            "lambda_base"}; accept_len counts the bonus token and is a mean over blocks that have a label.
        """
        weight = self.weight + EPSILON
        labels, blocks = jnp.maximum(sums["labels"], 1.0), jnp.maximum(sums["blocks"], 1.0)
        return {
            "loss": self.loss(sums),
            "final_loss": sums["final_loss"] / weight,
            "base_loss": sums["base_loss"] / weight,
            "accuracy": sums["final_correct"] / labels,
            "base_accuracy": sums["base_correct"] / labels,
            "accept_len": sums["final_accepted"] / blocks,
            "base_accept_len": sums["base_accepted"] / blocks,
            "lambda_base": jnp.asarray(self.lambda_base, jnp.float32),
        }


def sliced_loss(parts: Parts, labels: Labels, objective: Objective) -> tuple[jax.Array, Sums]:
    """(loss, block_sums) of all blocks, `objective.slice_blocks` of each row at a time.

    When it is differentiated, the gradient of a slice is computed beside its logits, and the backward pass only
    multiplies it by the cotangent of the loss. So the logits are made once, where a rematerialised slice makes them
    twice. The sums are figures to report: no gradient flows through them.

    Slices are cut along the anchors and never along the rows: every device works on its own rows in every slice. Zeros
    fill the last slice, as blocks without a label.
    """
    blocks = labels.ids.shape[1]
    size = min(objective.slice_blocks, blocks)

    def row_losses(params, inputs, labels, states):
        outputs = parts.outputs_of(params, *inputs, states)
        sums = jax.vmap(objective.block_sums)(outputs, labels)
        return objective.loss(sums), sums

    def slices(inputs):
        return jax.tree.map(lambda x: cut(x, 1, size), (inputs, labels, parts.states))

    def total(rows):
        return jax.tree.map(lambda x: x.sum(axis=0), rows)  # once, after the slices: rows are spread over devices

    @jax.custom_vjp
    def loss_of(params, inputs):
        return total(scan_sum(functools.partial(row_losses, params), slices(inputs)))

    def with_gradients(params, inputs):
        def of_slice(inputs, labels, states):
            losses_of = functools.partial(row_losses, labels=labels, states=states)
            losses, pull_back, sums = jax.vjp(losses_of, params, inputs, has_aux=True)
            of_params, of_inputs = pull_back(jnp.ones_like(losses))
            return (losses, sums, of_params), of_inputs

        (losses, sums, of_params), of_inputs = scan_sum_and_stack(of_slice, slices(inputs))
        return total((losses, sums)), (of_params, jax.tree.map(lambda x: joined(x, 1, blocks), of_inputs))

    def backward(gradients, cotangents):
        return jax.tree.map(lambda gradient: (cotangents[0] * gradient).astype(gradient.dtype), gradients)

    loss_of.defvjp(with_gradients, backward)
    return loss_of(parts.params, parts.inputs)


def scan_sum(function: Callable[..., Any], parts: Any) -> Any:
    """The sum of function(*part), one part after the other; `parts` has them along axis 0 of every array."""
    return scan_sum_and_stack(lambda *part: (function(*part), None), parts)[0]


def scan_sum_and_stack(function: Callable[..., tuple[Any, Any]], parts: Any) -> tuple[Any, Any]:
    """As scan_sum for a function with two results: the sum of the first ones and the second ones along axis 0."""
    first, _ = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], parts))
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)

    def add(total, part):
        summed, stacked = function(*part)
        return jax.tree.map(jnp.add, total, summed), stacked

    return jax.lax.scan(add, zero, parts)
