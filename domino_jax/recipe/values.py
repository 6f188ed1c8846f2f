"""Single values of a recipe: what those that it leaves open stand for, and the form in which a check refuses one."""

from collections.abc import Collection
from typing import Any

from domino_jax.method.kinds import KINDS
from domino_jax.method.settings import Problem
from domino_jax.runtime.errors import DominoError

# ------------------------------------------------------------------------------------------------ open values


def shifts_labels(drafter) -> bool:
    """drafter.shift_label, or what public checkpoints of its head have: servers take plain DFlash as unshifted."""
    return KINDS[drafter.head].shifts_labels if drafter.shift_label is None else drafter.shift_label


def convolution_taps(drafter) -> int:
    """drafter.conv_kernel_size, or what public checkpoints of its head have."""
    return KINDS[drafter.head].conv_taps if drafter.conv_kernel_size is None else drafter.conv_kernel_size


def has_own_loss(head: str, train) -> bool:
    """Whether a block drafter trains with the loss of its head, and not with Domino's cross-entropy."""
    return train.loss == "own" and KINDS[head].own_loss


# --------------------------------------------------------------------------------------------------- refusals


def require(fine: bool, key: str, value: Any, change: str) -> None:
    """DominoError by the recipe's key and value unless `fine`."""
    if not fine:
        raise DominoError(f"config.{key} is {value!r}: {change}.")


def refuse(section: str, problem: Problem | None) -> None:
    """DominoError for the problem, if there is one."""
    if problem:
        raise DominoError(f"config.{section}.{problem}")


def whole_numbers(values: Collection, least: int = 0) -> bool:
    """Whether all values are integers of at least `least`."""
    return all(isinstance(value, int) and not isinstance(value, bool) and value >= least for value in values)
