"""Single values of a recipe: what those that it leaves open stand for, and the form in which a check refuses one.

Nothing here imports jax, so that a recipe is checked before jax starts.
"""

from collections.abc import Collection
from typing import Any

from domino_jax.method.names import DFLASH2, DOMINO, MARKOV
from domino_jax.method.settings import Problem
from domino_jax.runtime.errors import DominoError

# ------------------------------------------------------------------------------------------------ open values


def shifts_labels(drafter) -> bool:
    """drafter.shift_label, or what public checkpoints of its head have: servers take plain DFlash as unshifted."""
    return drafter.head in (DOMINO, MARKOV) if drafter.shift_label is None else drafter.shift_label


def convolution_taps(drafter) -> int:
    """drafter.conv_kernel_size, or what public checkpoints of its head have."""
    default = 2 if drafter.head == DFLASH2 else 0
    return default if drafter.conv_kernel_size is None else drafter.conv_kernel_size


def confidence_head(config) -> bool:
    """drafter.enable_confidence_head of a Markov drafter, or whether its loss trains one."""
    stated = config.drafter.enable_confidence_head
    return trains_confidence(config.train) if stated is None else stated


# --------------------------------------------------------------------------------------------------- the loss


def has_own_loss(head: str, train) -> bool:
    """Whether a block drafter trains with the loss of its head, and not with Domino's cross-entropy."""
    return train.loss == "own" and head in (MARKOV, DFLASH2)


def trains_confidence(train) -> bool:
    """Whether the loss of a Markov drafter trains its confidence head."""
    return has_own_loss(MARKOV, train) and train.markov_weights[2] > 0


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
