"""What drafters without blocks learn from every row of a text: the heads of Medusa, the passes of EAGLE-3.

Arrays are [B, S, J, ...]: the S rows of a text take the place of the blocks of losses.py, and J heads or passes that of
the slots. The same slices bound how many logits are in memory.
"""

import dataclasses

import jax
import jax.numpy as jnp

from domino_jax.method.heads.eagle3_config import Eagle3Config
from domino_jax.method.heads.medusa import MedusaConfig
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.losses import Labels, Outputs, Sums, accepted_lengths, cross_entropy, sliced_loss
from domino_jax.method.names import EAGLE3, MEDUSA
from domino_jax.method.pair import Models
from domino_jax.models.shapes import Features, Hidden

SLICE_LOGITS = 512  # rows of logits of one text that are in memory at once, as of 32 blocks of 16 slots


@dataclasses.dataclass(frozen=True)
class MedusaSettings:
    """Choices of Medusa's loss.

    decay: head i counts decay^i (speculators: 0.8; FasterDecoding's trainer: 1).
    """

    decay: float = 0.8

    kind = MEDUSA
    reads_target = True  # its last hidden states


@dataclasses.dataclass(frozen=True)
class Eagle3Settings:
    """Choices of the training-time test of EAGLE-3.

    passes: J.  decay: pass j counts decay^j.
    """

    passes: int = 7
    decay: float = 0.8

    kind = EAGLE3
    reads_target = True


RowSettings = MedusaSettings | Eagle3Settings


@dataclasses.dataclass(frozen=True)
class RowObjective:
    """What a step on rows minimises and reports.

    settings: whose loss it is.
    scale: float32 [J], what the sum of a head's or a pass' losses is multiplied by.
    slice_blocks: rows of each text whose logits are in memory at once.
    """

    settings: RowSettings
    scale: jax.Array
    slice_blocks: int

    def loss(self, sums: Sums) -> jax.Array:
        """The scalar to minimise, of sums of any part of the rows: additive over slices and micro-batches."""
        return jnp.sum(self.scale * sums["losses"], axis=-1)


def shifted(x: jax.Array, by: int) -> jax.Array:
    """x [B, S, ...] moved `by` places along S, to later ones where by > 0; zeros move in."""
    size = min(abs(by), x.shape[1])
    ends = (size, 0) if by > 0 else (0, size)
    rest = x[:, : x.shape[1] - size] if by > 0 else x[:, size:]
    return jnp.pad(rest, [(0, 0), ends, *[(0, 0)] * (x.ndim - 2)])


def row_labels(config: AnyConfig, batch: dict[str, jax.Array], settings: RowSettings) -> Labels:
    """The labels of a batch, computed once per step; loss_weights are label_weights, because `scale` has the rest."""
    if isinstance(config, MedusaConfig):
        ids, weights = medusa_labels(batch, config.num_heads)
    else:
        ids, weights = eagle3_labels(batch, settings.passes)
    return Labels(ids, weights, weights)


def row_objective(config: AnyConfig, labels: Labels, settings: RowSettings) -> RowObjective:
    """The objective of the whole batch, whose labels are known before any forward pass."""
    _, length, count = labels.ids.shape
    decay = settings.decay ** jnp.arange(count, dtype=jnp.float32)
    if isinstance(config, MedusaConfig):
        scale = decay / jnp.maximum(labels.label_weights.sum((0, 1)), 1.0)
        return MedusaObjective(settings, scale, max(SLICE_LOGITS // count, 1))
    # All positions, supervised or not, as in the public trainers.
    scale = decay / (labels.ids.shape[0] * length)
    return Eagle3Objective(settings, scale, max(SLICE_LOGITS // (count + 1), 1), config)


def row_loss(
    models: Models,
    features: Features | None,
    batch: dict[str, jax.Array],
    labels: Labels,
    objective: "MedusaObjective | Eagle3Objective",
    hidden: Hidden,
) -> tuple[jax.Array, Sums]:
    """The loss of a batch and its sums, through which no gradient flows.

    Args:
        features, hidden: of the target, [B, S, C·D] and [B, S, D] (after the final norm).
    """
    head_params = models.target.with_gathered_head(models.target_params)

    def unembed(rows):
        return models.target.apply({"params": head_params}, rows, method="unembed")

    if isinstance(models.drafter.config, MedusaConfig):
        z = models.drafter.apply({"params": models.drafter_params}, hidden)
        return sliced_loss(lambda _, z, states: Outputs(unembed(z), None), {}, (z,), (labels, None), objective)
    states = eagle3_states(models, features, batch, labels.ids.shape[2])
    # Pass j has row s-1-j beside the target's state at s, which teaches it.
    z = jnp.stack([shifted(states[:, :, index], 1 + index) for index in range(states.shape[2])], axis=2)
    trained = {name: models.drafter_params[name] for name in ("norm", "lm_head")}

    def outputs_of(params, z, teacher):
        return Outputs(models.drafter.apply({"params": params}, z, method="logits"), None, unembed(teacher))

    return sliced_loss(outputs_of, trained, (z,), (labels, hidden), objective)


# -------------------------------------------------------------------------------------------------------- Medusa


def medusa_labels(batch: dict[str, jax.Array], heads: int) -> tuple[jax.Array, jax.Array]:
    """ids int32 and weights float32, [B, S, K]: head i at row t is labelled by the token at t+2+i.

    In packed rows no label is taken from another document than the row's.
    """
    tokens = batch["tokens"]
    documents = batch["documents"] if "documents" in batch else jnp.ones_like(tokens)
    mask = (batch["loss_mask"] > 0.5).astype(jnp.float32)

    def inside(place: int) -> jax.Array:
        return (shifted(documents, -place) == documents) & (documents > 0)

    ids = jnp.stack([shifted(tokens, -2 - head) for head in range(heads)], axis=2)
    weights = jnp.stack([shifted(mask, -2 - head) * inside(2 + head) for head in range(heads)], axis=2)
    return ids, weights


class MedusaObjective(RowObjective):
    """Per head the mean cross-entropy over its labels; heads added up with their weights."""

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        weights = labels.label_weights
        correct = jnp.argmax(outputs.base, axis=-1) == labels.ids
        has_label = weights.max(-1) > 0
        return {
            "losses": (weights * cross_entropy(outputs.base, labels.ids)).sum(0),
            "correct": (weights * correct).sum(0),
            "labels": weights.sum(0),
            "rows": has_label.sum().astype(jnp.float32),
            "accepted": jnp.sum(accepted_lengths(correct, weights) * has_label),
        }

    def metrics(self, sums: Sums) -> dict[str, jax.Array]:
        """The metrics of the step: "loss", "accuracy" over all labels, "accept_len" as of blocks (losses.py), and for
        each head "loss_1", … (its mean) and "accuracy_1", …."""
        counts = jnp.maximum(sums["labels"], 1.0)
        return {
            "loss": self.loss(sums),
            "accuracy": sums["correct"].sum() / jnp.maximum(sums["labels"].sum(), 1.0),
            "accept_len": sums["accepted"] / jnp.maximum(sums["rows"], 1.0),
            **numbered("loss", sums["losses"] / counts),
            **numbered("accuracy", sums["correct"] / counts),
        }


# ------------------------------------------------------------------------------------------------------- EAGLE-3


def eagle3_states(models: Models, features: Features, batch: dict[str, jax.Array], passes: int) -> jax.Array:
    """The states [B, S, J, D] of all passes; past the row its tokens are token 0."""
    embedded = models.embed(jnp.pad(batch["tokens"], ((0, 0), (0, passes))))
    packed = [batch[name] if name in batch else None for name in ("positions", "documents")]
    return models.drafter.apply({"params": models.drafter_params}, features, embedded, passes, *packed)


def eagle3_labels(batch: dict[str, jax.Array], passes: int) -> tuple[jax.Array, jax.Array]:
    """ids int32 and weights float32, [B, S, J], by the place s of the target's state that teaches: pass j at row s-1-j
    predicts the token at s+1, and counts where that token is supervised. In packed rows all of these places are in one
    document.
    """
    tokens = batch["tokens"]
    documents = batch["documents"] if "documents" in batch else jnp.ones_like(tokens)
    mask = (batch["loss_mask"] > 0.5).astype(jnp.float32)
    counts, document = shifted(mask, -1), shifted(documents, -1)
    rows = [counts * (shifted(documents, 1 + index) == document) for index in range(passes)]
    weights = jnp.stack(rows, axis=2) * (document > 0)[:, :, None]
    ids = jnp.broadcast_to(shifted(tokens, -1)[:, :, None], weights.shape)
    return ids, weights


@dataclasses.dataclass(frozen=True)
class Eagle3Objective(RowObjective):
    """Per pass the cross-entropy to the target's distribution over the draft vocabulary, where the target's own choice
    is in it; over all positions of the batch; passes added up with their weights."""

    config: Eagle3Config

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
            **numbered("loss", self.scale[0] * sums["losses"]),
            **numbered("accuracy", accuracies),
            **numbered("acceptance", sums["overlap"] / jnp.maximum(sums["taught"], 1.0)),
        }


def numbered(name: str, values: jax.Array) -> dict[str, jax.Array]:
    """{"NAME_1": first, …}."""
    return {f"{name}_{index + 1}": values[index] for index in range(values.shape[0])}
