"""The drafters: one dict of their configs, and what configs and modules have in common.

A config is a `HeadConfig` with `num_drafts`, `block_size` (rows of the pass that verifies num_drafts), `mask_token_id`
(None without blocks), `target_layer_ids` and the fields of `DecoderConfig`. Every module has the methods below;
drafting differs with and without a backbone (propose.py).

    example() -> arguments of `init`
    init_cache(batch, slots) -> the drafter's cache: a tuple of trees of arrays, never empty. Arrays with four axes,
        [B, K, S, H], grow with the text; a row of them depends on the text up to the token after it. All other arrays
        are [B, ...] and depend on the last row alone (decoding/prefixes.py).
    extend_context(cache, TargetRows, slots) -> the cache with the rows that the target has read
"""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafter import Drafter
from domino_jax.method.heads.dflash2 import Dflash2Config
from domino_jax.method.heads.domino import DominoConfig
from domino_jax.method.heads.eagle3 import Eagle3Config
from domino_jax.method.heads.eagle3_model import Eagle3
from domino_jax.method.heads.markov import MarkovConfig
from domino_jax.method.heads.xpress import XpressConfig
from domino_jax.runtime.errors import DataError, quote

_CONFIGS = (DrafterConfig, DominoConfig, MarkovConfig, Dflash2Config, XpressConfig, Eagle3Config)
CONFIGS = {config.head: config for config in _CONFIGS}  # {config.drafter.head: the config of such a drafter}
SHOWN = 6  # tensors of a folder that is no drafter
AnyConfig = DrafterConfig | Eagle3Config
AnyDrafter = Drafter | Eagle3


def config_class(raw: dict[str, Any], tensors: Collection[str] = ()) -> type[AnyConfig]:
    """Which config reads a parsed config.json; raises DataError if none does.

    tensors: names in the folder, by which alone a drafter may differ from a target.
    """
    # All block drafters have the keys of plain DFlash.
    known = next((config for config in reversed(CONFIGS.values()) if config.matches(raw, tensors)), None)
    if known:
        return known
    stated = ", ".join(f"{key} {quote(raw.get(key))}" for key in ("architectures", "model_type"))
    shown = ", ".join(sorted(tensors)[:SHOWN]) or "none"
    raise DataError(
        f"this is no drafter of a known kind ({', '.join(config.title for config in CONFIGS.values())}): {stated}; its"
        f" first tensors: {shown}. Name the folder of such a drafter."
    )


def parse_config(raw: dict[str, Any]) -> AnyConfig:
    return config_class(raw).from_dict(raw)


def new_drafter(
    config: AnyConfig, dtype: Any = jnp.float32, *, remat: bool = False, whole_head: bool = False
) -> AnyDrafter:
    """The module of a config; the choices are Drafter's. Without a backbone it reads remat alone."""
    if config.has_backbone:
        return Drafter(config, dtype, remat, whole_head)
    return config.module(config, dtype, remat)


def stored_config(config: AnyConfig) -> dict[str, Any]:
    """The config.json of a workdir: with the draft vocabulary, which a folder stores as tensors."""
    return config.to_dict() | ({} if config.has_backbone else {"draft_tokens": config.draft_tokens.tolist()})
