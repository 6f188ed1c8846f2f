"""The values of keys that a recipe leaves open, and its decode section as settings."""

from collections.abc import Collection
from typing import Any

from domino_jax.decoding.settings import TREE, DecodeSettings, default_modes
from domino_jax.method.drafters import CONFIGS
from domino_jax.method.losses import Loss
from domino_jax.method.settings import TreeSettings

COMMAND_KEYS = ("num_prompts", "tasks", "mesh")  # of the decode section, for the command alone


def shifts_labels(drafter) -> bool:
    """drafter.shift_label, or what public checkpoints of its head have: servers take plain DFlash as unshifted."""
    new = CONFIGS[drafter.head].new.get("shift_label", False)
    return new if drafter.shift_label is None else drafter.shift_label


def loss_class(head: str, loss: str) -> Any:
    """The loss of a drafter with this head; loss: train.loss, which only some heads read."""
    return Loss if loss == "cross_entropy" and "loss" in CONFIGS[head].reads else CONFIGS[head].loss


def modes_of(decode, head: str) -> tuple[str, ...]:
    """decode.modes, or the usual modes of a drafter with this head where the recipe leaves them open."""
    return default_modes(CONFIGS[head]) if decode.modes is None else tuple(decode.modes)


def width_of(decode, set_keys: Collection[str]) -> str:
    """decode.width where the command line sets it, else adaptive: for texts that are no measurement."""
    return decode.width if "decode.width" in set_keys else "adaptive"


def decode_settings(decode, head: str, rows: str | None = None) -> DecodeSettings:
    """The decode section as settings.

    Args:
        head: of the drafter, for modes that are left open.
        rows: data.train, for the draft vocabulary of a drafter without stored counts.
    """
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in decode.items()}
    values |= {"modes": modes_of(decode, head), "num_drafts": decode.num_drafts or None}
    # Without the mode a tree's rows must not count in how much cache a prompt needs.
    values["tree"] = TreeSettings(**decode.tree) if TREE in values["modes"] else None
    values["draft_vocab_rows"] = rows if decode.draft_vocab else None
    return DecodeSettings().change(**{name: value for name, value in values.items() if name not in COMMAND_KEYS})
