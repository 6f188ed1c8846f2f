"""Medusa heads between their public folders and their parameters.

The layout is that of vLLM and speculators. FasterDecoding's files, which name the same tensors otherwise, are read too.
The lm_head is the target's: copies of it are compared and dropped.
"""

from pathlib import Path
from typing import Any

import numpy as np

from domino_jax.method.heads.medusa import ARCHITECTURE, MedusaConfig
from domino_jax.method.names import MEDUSA
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import DataError, quote
from domino_jax.weights import hf
from domino_jax.weights.fit import check_fits
from domino_jax.weights.speculators import check_copies
from domino_jax.weights.target import LM_HEAD, Entry, Stored, linear

# {a copy's name: the target's}
COPIES = {"lm_head.weight": LM_HEAD, "lm_heads.0.weight": LM_HEAD}


def medusa_table(config: MedusaConfig) -> list[Entry]:
    """Every tensor of the heads."""
    table = []
    for head, layer in np.ndindex(config.num_heads, config.num_hidden_layers):
        name, path = f"blocks.{head}.layers.{layer}", (f"heads_{head}", f"layers_{layer}", "linear")
        table.append(linear(name, path, config.hidden_size, config.hidden_size))
        if config.bias:
            table.append(Entry(f"{name}.bias", (*path, "bias"), (config.hidden_size,)))
    return table


def open_medusa(
    tensors: hf.Tensors, raw: dict[str, Any], target: Qwen3Config, target_path: str | Path | None
) -> Stored:
    """The heads of a folder whose config.json is `raw`; the others as for load_drafter."""
    config = hf.parse_config(tensors.folder, raw, lambda raw: MedusaConfig.from_dict(_public(raw, target)))
    check_fits(config, target)
    check_copies(tensors, target_path, COPIES)
    table = medusa_table(config)
    aliases = {entry.name.removeprefix("blocks.").replace(".layers.", "."): entry.name for entry in table}
    aliases = {".linear.".join(name.rsplit(".", 1)): entry for name, entry in aliases.items()}
    return Stored(config, table, tuple(COPIES), aliases)


def _public(raw: dict[str, Any], target: Qwen3Config) -> dict[str, Any]:
    """The config.json in the layout of vLLM, from FasterDecoding's, which names no widths and always has biases."""
    if "medusa_num_heads" not in raw:
        names = raw.get("architectures") or [ARCHITECTURE]
        if names != [ARCHITECTURE]:
            raise DataError(f"this Medusa drafter has architectures {quote(names)}; only {ARCHITECTURE} is supported.")
        return raw
    return {
        **raw,
        "model_type": MEDUSA,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_heads": raw["medusa_num_heads"],
        "num_hidden_layers": raw.get("medusa_num_layers", 1),
        "medusa_fc_bias": True,
        "original_lm_head": True,  # heads with separate matrices have tensors that the table does not name
    }
