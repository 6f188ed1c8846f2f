"""DFlash2's loss: the cross-entropy of the backbone's logits, and that of the selector's scores of few candidates.

A slot whose label is not among its candidates has nothing that the selector could choose. The selector's term leaves it
out, as in SpecForge. The formulas are in docs/heads.md.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from domino_jax.method.candidates import Candidates, largest
from domino_jax.method.losses import (
    EPSILON,
    Labels,
    LossSettings,
    Objective,
    Outputs,
    Sums,
    accepted_lengths,
    cross_entropy,
    dpace_weights,
)
from domino_jax.method.names import DFLASH2
from domino_jax.method.pair import Models
from domino_jax.method.rollout import roll_out_blocks
from domino_jax.models.shapes import Hidden, Logits


@dataclasses.dataclass(frozen=True)
class SelectorSettings(LossSettings):
    """Choices of this loss, which does not read distill."""

    kind = DFLASH2
    reads_target = False


class Choices(NamedTuple):
    """What the selector makes of the M predicting slots of n blocks, arrays [..., n, M] or [..., n, M, K].

    tokens: int32, the candidates.  scores: float32, teacher-forced.
    covered: bool, whether the label is among the candidates.
    path: int32, the tokens that decoding would draft: each slot follows the choice before it.
    """

    tokens: jax.Array
    scores: jax.Array
    covered: jax.Array
    path: jax.Array


class Teacher(NamedTuple):
    """What the selector is given of the text: labels int32 [..., A, M], and the anchors' tokens int32 [..., A]."""

    labels: jax.Array
    anchors: jax.Array


@dataclasses.dataclass(frozen=True)
class SelectorObjective(Objective):
    """L = (Σ w·CE(base) + α · Σ w·CE(selector)) / Σ w; lambda_base is α.

    Slots whose label is no candidate stay in the divisor.
    """

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        return selector_sums(outputs.base, outputs.extra, labels, self.settings)

    def loss(self, sums: Sums) -> jax.Array:
        return (sums["base_loss"] + self.lambda_base * sums["selector_loss"]) / (self.weight + EPSILON)

    def metrics(self, sums: Sums) -> dict[str, jax.Array]:
        return selector_metrics(sums, self.loss(sums), self.lambda_base)


def selector_outputs(models: Models, unembed: Callable[[Hidden], Logits]) -> Callable[..., Outputs]:
    """outputs_of for `sliced_loss`: (head's parameters, z [B, n, G, D], codes [B, n, M, E], None, Teacher) → Outputs.

    Args:
        models: its head's parameters give the drafted paths, without a gradient.
        unembed: z → base logits.
    """
    config = models.drafter.config
    drafting = models.replace(drafter_params=jax.lax.stop_gradient(models.drafter_params))

    def outputs_of(params, z: Hidden, codes: jax.Array, _: None, teacher: Teacher) -> Outputs:
        z = z[:, :, config.first_slot :]
        base = unembed(z)
        served = largest(jax.lax.stop_gradient(base), config.selector_top_k)
        tokens = served[1]
        covered = (tokens == teacher.labels[..., None]).any(axis=-1)
        unary = jnp.take_along_axis(base, tokens, axis=-1)
        scores = unary + pair_scores(models.replace(drafter_params={"head": params}), codes, tokens)
        candidates = Candidates(tokens, served[0])
        path = roll_out_blocks(drafting, teacher.anchors, jax.lax.stop_gradient(z), candidates)
        return Outputs(base, base, extra=Choices(tokens, scores, covered, path))

    return outputs_of


def pair_scores(models: Models, codes: jax.Array, tokens: jax.Array) -> jax.Array:
    """The head's corrections float32 [..., K] of tokens int32 [..., K] by one code [..., E] each."""
    return models.residual_of(codes[..., None, :], models.head_rows(tokens))[..., 0, :]


def selector_sums(base: Logits, choices: Choices, labels: Labels, settings: SelectorSettings) -> Sums:
    """Additive sums of one slice: base logits [n, M, V], choices [n, M, ...], labels with arrays [n, G] → scalars.

    D-PACE weights follow from the losses of the base logits and weigh both terms.
    """
    first = labels.ids.shape[1] - base.shape[1]
    ids, label_weights, weights = (x[:, first:] for x in labels)
    base_losses = cross_entropy(base, ids)
    if settings.dpace_alpha is not None:
        weights = weights * dpace_weights(base_losses, label_weights, settings.dpace_alpha)
    supervised, has_label = label_weights > 0, label_weights.max(-1) > 0
    is_label = choices.tokens == ids[..., None]
    losses = jax.nn.logsumexp(choices.scores, axis=-1) - jnp.sum(jnp.where(is_label, choices.scores, 0.0), axis=-1)
    right = jnp.take_along_axis(is_label, jnp.argmax(choices.scores, axis=-1, keepdims=True), axis=-1)[..., 0]
    covered_weights = weights * choices.covered
    base_right = jnp.argmax(base, axis=-1) == ids
    return {
        "blocks": jnp.sum(has_label).astype(jnp.float32),
        "labels": label_weights.sum(),
        "weight": labels.weight,
        "base_loss": jnp.sum(weights * base_losses),
        "base_correct": jnp.sum(label_weights * base_right),
        "base_accepted": jnp.sum(accepted_lengths(base_right, label_weights) * has_label),
        "selector_loss": jnp.sum(covered_weights * losses),
        "selector_correct": jnp.sum(covered_weights * right),
        "covered_weight": covered_weights.sum(),
        "covered": jnp.sum(label_weights * choices.covered),
        "served": jnp.sum(leading_run(supervised & (choices.path == ids)) * has_label),
        "served_by_oracle": jnp.sum(leading_run(supervised & choices.covered) * has_label),
    }


def leading_run(right: jax.Array) -> jax.Array:
    """1 + the length of the run of True that bool [..., M] starts with: float32 [...].

    >>> 1 1 0 1  →  3    0 1 1 1  →  1
    """
    return 1.0 + jnp.sum(jnp.cumprod(right.astype(jnp.float32), axis=-1), axis=-1)


def selector_metrics(sums: Sums, loss: jax.Array, alpha: jax.Array) -> dict[str, jax.Array]:
    """The metrics of a step from the sums of its whole batch.

    Returns:
        "loss"; "base_loss", "base_accuracy" and "base_accept_len" of the backbone's logits, as in loss_metrics;
        "selector_loss" and "selector_accuracy" over the slots whose label is a candidate, and their share
        "selector_coverage"; "serving_accept_len" of the path that decoding would draft, and
        "oracle_accept_len" of a selector that always finds the label, where both paths end at the first slot without a
        label and the bonus token counts; "selector_alpha".
    """
    labels, blocks = jnp.maximum(sums["labels"], 1.0), jnp.maximum(sums["blocks"], 1.0)
    return {
        "loss": loss,
        "base_loss": sums["base_loss"] / (sums["weight"] + EPSILON),
        "base_accuracy": sums["base_correct"] / labels,
        "base_accept_len": sums["base_accepted"] / blocks,
        "selector_loss": sums["selector_loss"] / (sums["covered_weight"] + EPSILON),
        "selector_accuracy": sums["selector_correct"] / (sums["covered_weight"] + EPSILON),
        "selector_coverage": sums["covered"] / labels,
        "serving_accept_len": sums["served"] / blocks,
        "oracle_accept_len": sums["served_by_oracle"] / blocks,
        "selector_alpha": jnp.asarray(alpha, jnp.float32),
    }
