"""Whether a drafter fits the target that it is loaded for, and whether its weights can be another drafter's."""

import dataclasses
from pathlib import Path
from typing import Any

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafters import AnyConfig
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import DataError

# Fields whose different values may mean the same windows and causal layers.
_PER_LAYER = ("layer_types", "sliding_window", "is_causal")


def check_fits(config: AnyConfig, target: Qwen3Config) -> None:
    """Raises DataError unless the drafter was made for a target of these shapes."""
    pairs = {name: (getattr(config, name), getattr(target, name)) for name in ("hidden_size", "vocab_size")}
    if config.has_backbone:
        pairs["target layers"] = (config.num_target_layers, target.num_hidden_layers)
    last = target.num_hidden_layers - 1
    beyond = [index for index in config.target_layer_ids if not 0 <= index < last]
    problems = [
        f"the drafter was made for {name} {ours}, but the target has {theirs}; name its target"
        for name, (ours, theirs) in pairs.items()
        if ours != theirs
    ]
    if beyond:
        problems.append(
            f"the drafter's target_layer_ids hold {beyond}, but the target has layers 0..{last}, and the last one's"
            " public hidden state is already normed, so it cannot be tapped"
        )
    if problems:
        raise DataError(f"{problems[0]}.")


def refuse_other_drafter(config: AnyConfig, stored: AnyConfig, path: str | Path) -> None:
    """Raises DataError unless the stored drafter's weights fit a drafter with `config`."""
    _compare("drafter", path, _fields(stored), _fields(config))


def refuse_other_backbone(config: DrafterConfig, stored: AnyConfig, path: str | Path) -> None:
    """Raises DataError unless the stored drafter's backbone fits `config`; heads may differ."""
    if not stored.has_backbone:
        raise DataError(f"{path} holds a drafter of {stored.head}, which has no backbone; name a block drafter.")
    _compare("backbone", path, _backbone(stored), _backbone(config))


def _compare(part: str, path: str | Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for name, value in ours.items():
        if theirs[name] != value:
            raise DataError(
                f"the {part} of {path} has {name} {theirs[name]}, and the recipe's drafter has {value}.\n"
                "Give the recipe the values of that drafter (its config.json), or name another one."
            )


def _fields(config: AnyConfig) -> dict[str, Any]:
    fields = {"head": config.head} | {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if not config.has_backbone:
        return fields
    return {name: value for name, value in fields.items() if name not in _PER_LAYER} | _backbone(config)


def _backbone(config: DrafterConfig) -> dict[str, Any]:
    """The values that two drafters with exchangeable backbones share; the fields about layers layer by layer."""
    names = [field.name for field in dataclasses.fields(DrafterConfig)]
    layers = range(config.num_hidden_layers)
    return {name: getattr(config, name) for name in names if name not in (*_PER_LAYER, "draft_token_bytes")} | {
        "windows": [config.window(layer) for layer in layers],
        "causal layers": [config.causal(layer) for layer in layers],
    }
