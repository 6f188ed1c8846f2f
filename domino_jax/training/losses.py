"""The dual cross-entropy of Domino and its metrics, reduced in slices of anchor blocks (CONTRACT §2.6-14).

A slice is a few anchor blocks. Its logits are made, reduced to additive sums and dropped, forward and backward, so the
[A·G, V] array of a batch never lives.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from domino_jax.drafter.blocks import position_decay
from domino_jax.drafter.config import DrafterConfig
from domino_jax.shapes import Logits

# The public trainers' guard against an empty batch: weights sum to at least 1 block, so 1e-6 moves nothing (CONTRACT
# §2.9).
EPSILON = 1e-6

Sums = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Choices of the loss, from the recipe.

    gamma: decay constant γ of the slot weights; None turns decay off.  contiguous: labels cut at the first unsupervised
    token.
    dpace_alpha: smoothing α of D-PACE weights, which then replace the decay; None is off.
    slice_blocks: anchor blocks per slice of the vocabulary projection.
    """

    gamma: float | None = 7.0
    contiguous: bool = True
    dpace_alpha: float | None = None
    slice_blocks: int = 128


def cross_entropy(logits: Logits, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[labels], float32 [...]; logits [..., V], labels int32 [...]."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def accepted_lengths(correct: jax.Array, raw_weights: jax.Array) -> jax.Array:
    """1 + Σ_k valid_k · ∏_{j≤k} (correct_j or not valid_j): float32 [...] from two [..., G] arrays (CONTRACT §2.13).

    Slots without a label neither break a run nor count.
    """
    valid = raw_weights > 0
    running = jnp.cumprod((correct | ~valid).astype(jnp.float32), axis=-1)
    return 1.0 + jnp.sum(running * valid, axis=-1)


def dpace_weights(losses: jax.Array, raw_weights: jax.Array, alpha: float) -> jax.Array:
    """D-PACE slot weights [..., G] (arXiv 2605.18810; CONTRACT §2.14).

    q = exp(-CE), smoothed to (1-α)q + α and 1 on slots without a label; c_k = ∏_{j≤k} q_j; weight_k = Σ_{i≥k} c_i·w0_i:
    what slot k is worth to the expected accepted length. No gradient flows through it.
    """
    confidence = jnp.exp(-jax.lax.stop_gradient(losses))
    smoothed = jnp.where(raw_weights > 0, (1.0 - alpha) * confidence + alpha, 1.0)
    reached = jnp.cumprod(smoothed, axis=-1) * raw_weights
    return jnp.flip(jnp.cumsum(jnp.flip(reached, -1), axis=-1), -1)


def block_sums(
    base: Logits,
    final: Logits,
    labels: jax.Array,
    raw_weights: jax.Array,
    config: DrafterConfig,
    settings: LossSettings,
) -> Sums:
    """Additive sums of one slice: base and final logits [n, G, V], labels and raw weights [n, G] → scalars.

    Numerators and denominators only, so that slices, devices and micro-batches add up to the whole.
    """
    sums = {"blocks": jnp.sum(raw_weights.max(-1) > 0).astype(jnp.float32), "labels": raw_weights.sum()}
    decay = position_decay(config.block_size, config.shift_label, settings.gamma)
    for prefix, logits in (("base_", base), ("final_", final)):
        losses = cross_entropy(logits, labels)
        if settings.dpace_alpha is None:
            weights = raw_weights * decay
        else:
            weights = raw_weights * dpace_weights(losses, raw_weights, settings.dpace_alpha)
        correct = jnp.argmax(logits, axis=-1) == labels
        has_label = raw_weights.max(-1) > 0
        sums[prefix + "loss"] = jnp.sum(weights * losses)
        sums[prefix + "weight"] = jnp.sum(weights)
        sums[prefix + "correct"] = jnp.sum(raw_weights * correct)
        sums[prefix + "accepted"] = jnp.sum(accepted_lengths(correct, raw_weights) * has_label)
    return sums


def sliced_sums(
    logits_of: Callable[..., tuple[Logits, Logits]],
    inputs: tuple[jax.Array, ...],
    labels: jax.Array,
    raw_weights: jax.Array,
    config: DrafterConfig,
    settings: LossSettings,
) -> Sums:
    """block_sums over all blocks, `settings.slice_blocks` at a time, each slice rematerialised in the backward pass.

    Args:
        logits_of: maps a slice of every array of `inputs` to (base, final) logits [n, G, V].
        inputs: arrays [blocks, ...].  labels, raw_weights: [blocks, G].
    """
    blocks = labels.shape[0]
    size = min(settings.slice_blocks, blocks)
    padding = -blocks % size

    def in_slices(x):
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))  # padded blocks have weight 0
        return x.reshape(-1, size, *x.shape[1:])

    @jax.checkpoint
    def one(inputs, labels, raw_weights):
        base, final = logits_of(*inputs)
        return block_sums(base, final, labels, raw_weights, config, settings)

    slices = jax.tree.map(in_slices, (inputs, labels, raw_weights))
    if blocks + padding == size:
        return one(*jax.tree.map(lambda x: x[0], slices))
    zero = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, *jax.tree.map(lambda x: x[0], slices))
    )
    return jax.lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, one(*x)), None), zero, slices)[0]


def dual_loss(sums: Sums, lambda_base: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """L = (1-λ)F + λG from the summed numerators and denominators, and the metrics of CONTRACT §2.13.

    Returns:
        the scalar loss and {"loss", "final_loss", "base_loss", "accuracy", "base_accuracy", "accept_len",
        "base_accept_len", "lambda_base"}; accept_len counts the bonus token and is a mean over blocks that have a
        label.
    """
    final_loss = sums["final_loss"] / (sums["final_weight"] + EPSILON)
    base_loss = sums["base_loss"] / (sums["base_weight"] + EPSILON)
    loss = (1.0 - lambda_base) * final_loss + lambda_base * base_loss
    labels, blocks = jnp.maximum(sums["labels"], 1.0), jnp.maximum(sums["blocks"], 1.0)
    return loss, {
        "loss": loss,
        "final_loss": final_loss,
        "base_loss": base_loss,
        "accuracy": sums["final_correct"] / labels,
        "base_accuracy": sums["base_correct"] / labels,
        "accept_len": sums["final_accepted"] / blocks,
        "base_accept_len": sums["base_accepted"] / blocks,
        "lambda_base": lambda_base,
    }
