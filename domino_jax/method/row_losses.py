"""What drafters without blocks learn from every row of a text.

Arrays are [B, S, J, ...]: the S rows of a text take the place of the blocks of losses.py, and J heads or passes that of
the slots. The same slices bound how many logits are in memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from domino_jax.method.losses import Labels, Parts, Sums, sliced_loss
from domino_jax.method.pair import Models
from domino_jax.models.shapes import Features, Hidden, Logits

SLICE_LOGITS = 512  # rows of logits of one text that are in memory at once, as of 32 blocks of 16 slots


class RowSettings:
    """Choices of the loss of a drafter without blocks; a head has a frozen dataclass with its own."""

    reads_target = True  # its last hidden states

    def labels(self, config: Any, batch: dict[str, jax.Array]) -> Labels:
        """The labels of a batch, computed once per step; loss_weights are label_weights, because `scale` has the
        rest."""
        raise NotImplementedError

    def objective(self, config: Any, labels: Labels) -> "RowObjective":
        """The objective of the whole batch, whose labels are known before any forward pass."""
        raise NotImplementedError


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

    def parts(
        self,
        models: Models,
        unembed: Callable[[Hidden], Logits],
        features: Features | None,
        batch: dict[str, jax.Array],
        hidden: Hidden,
    ) -> Parts:
        """The forward pass of a batch, with inputs (z [B, S, J, D],). features, hidden: as for row_loss."""
        raise NotImplementedError


def shifted(x: jax.Array, by: int) -> jax.Array:
    """x [B, S, ...] moved `by` places along S, to later ones where by > 0; zeros move in."""
    size = min(abs(by), x.shape[1])
    ends = (size, 0) if by > 0 else (0, size)
    rest = x[:, : x.shape[1] - size] if by > 0 else x[:, size:]
    return jnp.pad(rest, [(0, 0), ends, *[(0, 0)] * (x.ndim - 2)])


def row_loss(
    models: Models,
    features: Features | None,
    batch: dict[str, jax.Array],
    labels: Labels,
    objective: RowObjective,
    hidden: Hidden,
) -> tuple[jax.Array, Sums]:
    """The loss of a batch and its sums, through which no gradient flows.

    Args:
        features, hidden: of the target, [B, S, C·D] and [B, S, D] (after the final norm).
    """
    parts = objective.parts(models, models.with_gathered_head().unembed, features, batch, hidden)
    return sliced_loss(parts, labels, objective)


def numbered(name: str, values: jax.Array) -> dict[str, jax.Array]:
    """{"NAME_1": first, …}."""
    return {f"{name}_{index + 1}": values[index] for index in range(values.shape[0])}
