"""The drafters of all kinds: what their configs and their modules have in common, and new ones of either.

A config has `head` (names.HEADS), `has_backbone`, `has_head`, `num_drafts`, `most_drafts`, `block_size` (rows of the
pass that verifies num_drafts), `target_layer_ids`, `num_key_value_heads`, `vocab_size`, `max_position_embeddings` and
`to_dict`. Every module has the methods below; drafting differs by kind (method/propose.py).

    example() -> arguments of `init`
    init_cache(batch, slots) -> what it keeps of the text: a tuple of trees of arrays. Those with four axes are caches
        [B, K, S, H], which grow with the text; all others are [B, ...]. Never an empty tuple.
    extend_context(cache, Passed, slots) -> the cache with the rows that the target has read
"""

from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafter import Drafter
from domino_jax.method.heads.eagle3 import Eagle3
from domino_jax.method.heads.eagle3_config import Eagle3Config
from domino_jax.method.heads.medusa import Medusa, MedusaConfig
from domino_jax.runtime.errors import DataError, quote

SHOWN = 6  # tensors of a folder that is no drafter
AnyConfig = DrafterConfig | Eagle3Config | MedusaConfig
AnyDrafter = Drafter | Eagle3 | Medusa


def config_class(raw: dict[str, Any], tensors: Callable[[], Collection[str]] = tuple) -> type[AnyConfig]:
    """Which config reads a parsed config.json: the one whose keys it has, else the one whose tensors are there.

    Args:
        tensors: gives the names in the folder, if they are needed.

    Raises:
        DataError: no drafter of a known kind.
    """
    for keys, names in ((raw, tuple), ({}, tensors)):
        for kind in (DrafterConfig, MedusaConfig, Eagle3Config):
            if kind.matches(keys, names()):
                return kind
    stated = ", ".join(f"{key} {quote(raw.get(key))}" for key in ("architectures", "model_type"))
    shown = ", ".join(sorted(tensors())[:SHOWN]) or "none"
    raise DataError(
        f"this is no drafter of a known kind (DFlash, Domino, DSpark, DFlash2, EAGLE-3, Medusa): {stated}; its first"
        f" tensors: {shown}. Name the folder of such a drafter."
    )


def new_drafter(
    config: AnyConfig,
    dtype: Any = jnp.float32,
    *,
    attention_blocks: int | None = None,
    remat: bool = False,
    whole_head: bool = False,
) -> AnyDrafter:
    """The module of a config; the choices are Drafter's, and the other kinds read those that they have."""
    if isinstance(config, MedusaConfig):
        return Medusa(config, dtype)
    if isinstance(config, Eagle3Config):
        return Eagle3(config, dtype, remat)
    return Drafter(config, dtype, attention_blocks, remat, whole_head)
