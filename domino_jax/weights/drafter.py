"""The drafter between its public folder and its parameters.

58 tensors for a DFlash drafter of five layers, which has no head, 62 for a Domino one. Embeddings and lm_head are the
target's.
"""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from domino_jax.method.config_keys import section
from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.drafters import AnyConfig, config_class, new_drafter
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.models.tables import EMBEDDING, LM_HEAD, Entry, rename, table_of
from domino_jax.runtime.errors import warn_once
from domino_jax.weights import hf, speculators
from domino_jax.weights.fit import check_fits
from domino_jax.weights.target import Params, Sharding, file_tensors, load_table

# {a tensor of the target of which a folder may store a copy: its name in the target's}.
COPIES = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": LM_HEAD}
# Other names in public files. Early files and speculators keep a head's tensors under these.
HEAD_PREFIXES = ("logit_head.", "logits_correction.")
MODELOPT_THETA = 10_000.0
FLOATING = "Drafters are read in floating point; decode.draft_weights=int8 rounds such a one to eight bits."
EXPORT_DTYPE = "bfloat16"  # as public drafters are stored

log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=16)  # tracing takes half a second
def drafter_table(config: AnyConfig) -> list[Entry]:
    """Every tensor of floats of a drafter of this config."""
    drafter = new_drafter(dataclasses.replace(config, num_hidden_layers=1))  # the layers are alike
    shapes = jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0)))
    if config.has_backbone:
        first = shapes["backbone"].pop("layers_0")
        shapes["backbone"] |= {f"layers_{index}": first for index in range(config.num_hidden_layers)}
    return table_of(shapes, config.tensor_names)


def load_drafter(
    path: str | Path, target: Qwen3Config, dtype: Any, sharding: Sharding = None, target_path: str | Path | None = None
) -> tuple[AnyConfig, Params]:
    """A drafter that fits `target`, from a local folder, a hub id or a train workdir (its `export/`), in `dtype`.

    target_path: the target's folder or hub id, for drafters that store copies of its embedding or lm_head.
    """
    tensors = hf.open_tensors(hf.drafter_folder(path))
    config = read_drafter_config(path, target).with_tensors(tensors)
    table = drafter_table(config)
    stored = {entry.name for entry in table}
    copies = {name: original for name, original in COPIES.items() if name not in stored}
    speculators.check_copies(tensors, target_path, copies)
    choices = {"skipped": (*copies, *speculators.UNUSED), "aliases": aliases(config, table), "instead": FLOATING}
    return config, load_table(tensors, table, dtype, sharding, **choices)


def aliases(config: AnyConfig, table: list[Entry]) -> dict[str, str]:
    """{other name of a tensor in public files: its name in the table}."""
    head = [entry.name for entry in table if entry.path[0] == "head"]
    names = {prefix + name: name for prefix in HEAD_PREFIXES for name in head}
    # Tables as modules of embeddings, in z-lab's loader and in a branch of speculators.
    names |= {f"{name}.weight": name for name in head if not name.endswith((".weight", ".bias"))}
    return names | {rename(entry.name, speculators.OTHER_NAMES.get(config.head, {})): entry.name for entry in table}


def read_drafter_config(path: str | Path, target: Qwen3Config) -> AnyConfig:
    """The shapes of a drafter that fits `target`, without its weights; paths as for load_drafter."""
    folder = hf.drafter_folder(path)
    raw, tensors = hf.read_config(folder), hf.open_tensors(folder)
    with hf.naming(folder):
        if speculators.is_speculators(raw):
            raw = speculators.flattened(raw, target.num_hidden_layers)
        config = config_class(raw, tensors).from_dict(raw, target)
        check_fits(config, target)
    # modelopt alone writes causal there, and a config.json without the version of transformers.
    of_modelopt = "causal" in section(raw, "dflash_config") and "transformers_version" not in raw
    if of_modelopt and config.rope_theta != MODELOPT_THETA:
        warn_once(
            log,
            f"{folder} was written by modelopt. With transformers 5, modelopt 0.47 trains drafters at RoPE base 10,000"
            f" and writes the target's, here {config.rope_theta:,.0f}: if τ is low, set its rope_theta to 10000.",
        )
    return config


def save_drafter(folder: str | Path, config: AnyConfig, params: Params, dtype: str = EXPORT_DTYPE) -> None:
    """Writes a drafter, whose arrays this process can read, as a public folder."""
    raw = {**config.to_dict(), "dtype": np.dtype(dtype).name}
    hf.write_folder(folder, file_tensors(drafter_table(config), params, dtype) | config.extra_tensors(), raw)


def stored_head(path: str | Path) -> str:
    """The head (drafters.CONFIGS) of the drafter at `path`, without reading its weights; paths as for load_drafter."""
    folder = hf.drafter_folder(path)
    raw = hf.read_config(folder)
    with hf.naming(folder):
        raw = speculators.flattened(raw) if speculators.is_speculators(raw) else raw
        return config_class(raw, hf.open_tensors(folder)).head
