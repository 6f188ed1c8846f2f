"""The drafters of all kinds: what their configs and their modules have in common, and new ones of either.

A config has `head` (names.HEADS), `has_backbone`, `has_head`, `num_drafts`, `most_drafts`, `block_size` (rows of the
pass that verifies num_drafts), `target_layer_ids`, `num_key_value_heads`, `vocab_size`, `max_position_embeddings` and
`to_dict`. Every module has the methods below; drafting differs by kind (method/propose.py).

    example() -> arguments of `init`
    init_cache(batch, slots) -> what it keeps of the text: a tuple of trees of arrays. Those with four axes are caches
        [B, K, S, H], which grow with the text; all others are [B, ...]. Never an empty tuple.
    extend_context(cache, Passed, slots) -> the cache with the rows that the target has read
"""

from typing import Any

import jax.numpy as jnp

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafter import Drafter
from domino_jax.method.heads.eagle3 import Eagle3
from domino_jax.method.heads.eagle3_config import LAYER_IDS, Eagle3Config
from domino_jax.method.heads.medusa import Medusa, MedusaConfig
from domino_jax.method.names import MEDUSA

AnyConfig = DrafterConfig | Eagle3Config | MedusaConfig
AnyDrafter = Drafter | Eagle3 | Medusa


def config_class(raw: dict[str, Any]) -> type[AnyConfig]:
    """Which config reads a parsed config.json."""
    names = str(raw.get("architectures"))
    if "Medusa" in names or raw.get("model_type") == MEDUSA or "medusa_num_heads" in raw:
        return MedusaConfig
    if "Eagle3" in names or "eagle_config" in raw or LAYER_IDS in raw:
        return Eagle3Config
    return DrafterConfig


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
