"""The drafter between its public folder and its parameters.

58 tensors for a DFlash drafter of five layers, which has no head, 62 for a Domino one. Embeddings and lm_head are the
target's.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from domino_jax.method.config import DrafterConfig, head_of
from domino_jax.method.head import TOKEN_TABLES
from domino_jax.method.heads.eagle3_config import Eagle3Config
from domino_jax.method.heads.medusa import MedusaConfig
from domino_jax.method.kinds import AnyConfig, config_class
from domino_jax.method.names import DFLASH2, DOMINO, GATED, MARKOV, RANK_KEYS, RNN
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import DataError
from domino_jax.weights import formats, hf, speculators
from domino_jax.weights.eagle3 import eagle3_table, open_eagle3, vocabulary_tensors
from domino_jax.weights.fit import check_fits, differs
from domino_jax.weights.medusa import medusa_table, open_medusa
from domino_jax.weights.target import (
    Entry,
    Params,
    Sharding,
    Stored,
    decoder_layers,
    file_tensors,
    linear,
    load_table,
    norm,
)

EXPORT_DTYPE = "bfloat16"  # as public drafters are stored
_OLD_HEAD_PREFIX = "logit_head."  # early files keep the head's tensors under it


def drafter_table(config: AnyConfig) -> list[Entry]:
    """Every tensor of floats of a drafter of this config."""
    if not config.has_backbone:
        return medusa_table(config) if isinstance(config, MedusaConfig) else eagle3_table(config)
    c = config
    backbone = ("backbone",)
    table = [
        linear("fc", (*backbone, "fc"), c.hidden_size, len(c.target_layer_ids) * c.hidden_size),
        norm("hidden_norm", (*backbone, "hidden_norm"), c.hidden_size),
        *decoder_layers(c, "", backbone),
        *convolution_table(c),
        norm("norm", (*backbone, "norm"), c.hidden_size),
    ]
    return table + head_table(config)


def convolution_table(config: DrafterConfig) -> list[Entry]:
    """The convolutions of every layer; none where the drafter has none."""
    c, table = config, []
    if not c.conv_kernel_size:
        return table
    for layer, part in itertools.product(range(c.num_hidden_layers), ("attention_conv", "mlp_conv")):
        name, path = f"layers.{layer}.{part}", ("backbone", f"layers_{layer}", part)
        base = Entry(f"{name}.base_kernel", (*path, "base_kernel"), (2, c.conv_kernel_size, c.hidden_size))
        width = 2 * c.conv_kernel_size * c.conv_groups
        table += [base, linear(f"{name}.kernel_projection", (*path, "kernel_projection"), width, c.hidden_size)]
    return table


def head_table(config: DrafterConfig) -> list[Entry]:
    """The tensors of the head; none without one."""
    tables = {DOMINO: _domino_table, MARKOV: _markov_table, DFLASH2: _selector_table}
    return tables[config.head](config) if config.has_head else []


def _domino_table(c: DrafterConfig) -> list[Entry]:
    gru = ("head", "gru")
    return [
        Entry("prefix_gru.weight_ih_l0", (*gru, "weight_ih"), (3 * c.gru_hidden_dim, c.hidden_size), transpose=True),
        Entry("prefix_gru.weight_hh_l0", (*gru, "weight_hh"), (3 * c.gru_hidden_dim, c.gru_hidden_dim), transpose=True),
        linear("embed_proj.0", ("head", "down"), c.emb_dim, c.hidden_size + c.gru_hidden_dim),
        linear("embed_proj.2", ("head", "up"), c.vocab_size, c.emb_dim),
    ]


def _markov_table(c: DrafterConfig) -> list[Entry]:
    rank, width = c.markov_rank, c.hidden_size
    table = [
        Entry("markov_head.markov_w1.weight", ("head", "predecessor", "embedding"), (c.vocab_size, rank)),
        linear("markov_head.markov_w2", ("head", "up"), c.vocab_size, rank),
    ]
    if c.markov_head_type == GATED:
        table += _biased("markov_head.gate_proj", ("head", "gate"), rank, width + rank)
    if c.markov_head_type == RNN:
        table += _biased("markov_head.joint_proj", ("head", "joint"), 3 * rank, 2 * rank + width)
    if c.enable_confidence_head:
        inputs = width + (rank if c.confidence_head_with_markov else 0)
        table += _biased("confidence_head.proj", ("head", "confidence_proj"), 1, inputs)
    return table


def _biased(name: str, path: tuple[str, ...], out_width: int, in_width: int) -> list[Entry]:
    return [linear(name, path, out_width, in_width), Entry(f"{name}.bias", (*path, "bias"), (out_width,))]


def _selector_table(c: DrafterConfig) -> list[Entry]:
    name, codebook = "candidate_selector", (c.vocab_size, c.selector_rank)
    return [
        Entry(f"{name}.predecessor_codebook", ("head", "predecessor", "embedding"), codebook),
        Entry(f"{name}.successor_codebook", ("head", "up", "kernel"), codebook, transpose=True),
        linear(f"{name}.hidden_projection", ("head", "hidden_projection"), c.selector_rank, c.hidden_size),
    ]


def load_drafter(
    path: str | Path,
    target: Qwen3Config,
    dtype: Any,
    sharding: Sharding = None,
    target_path: str | Path | None = None,
) -> tuple[AnyConfig, Params]:
    """A drafter that fits `target`, from a local folder, a hub id or a train workdir (its `export/`), in `dtype`.

    target_path: the target's folder or hub id, for drafters that store copies of its embedding or lm_head.
    """
    folder = hf.drafter_folder(path)
    raw = hf.read_config(folder)
    with hf.naming(folder):
        tensors = hf.open_tensors(folder)
        kind = config_class(raw, lambda: tensors)
        if speculators.is_speculators(raw):
            raw = hf.parse_config(folder, raw, lambda raw: speculators.flattened(raw, target.num_hidden_layers))
        open_folder = {MedusaConfig: open_medusa, Eagle3Config: open_eagle3}.get(kind, _open_block_drafter)
        config, table, skipped, aliases = open_folder(tensors, raw, target, target_path)
        return config, load_table(tensors, table, dtype, sharding, skipped=skipped, aliases=aliases)


def _open_block_drafter(
    tensors: hf.Tensors, raw: dict[str, Any], target: Qwen3Config, target_path: str | Path | None
) -> Stored:
    """A drafter with a backbone, of a folder whose flat config.json is `raw`; the others as for load_drafter."""
    config = hf.parse_config(tensors.folder, raw, DrafterConfig.from_dict)
    check_fits(config, target)
    speculators.check_copies(tensors, target_path)
    skipped = (*speculators.COPIES, *speculators.UNUSED)
    return Stored(config, drafter_table(config), skipped, head_aliases(config))


def head_aliases(config: DrafterConfig) -> dict[str, str]:
    """{other name of a tensor of the head: its name in the table}."""
    heads = [entry.name for entry in head_table(config)]
    aliases = {prefix + name: name for prefix in (_OLD_HEAD_PREFIX, speculators.HEAD_PREFIX) for name in heads}
    # As modules of embeddings in z-lab's loader and in a branch of speculators.
    return aliases | {f"{name}.weight": name for name in heads if name.endswith("_codebook")}


def load_token_tables(path: str | Path, config: DrafterConfig) -> Params:
    """The tables of tokens of the head of the drafter at `path`, in float32: all of it that knows no target's widths.

    Args:
        path: as for load_drafter, in the public layout.  config: of the drafter that takes them.

    Raises:
        DataError: another head, rank or number of tokens, or a folder that is damaged.
    """
    folder = hf.drafter_folder(path)
    raw = hf.read_config(folder)
    stored = hf.parse_config(folder, raw, config_class(raw).from_dict)
    for name in ("head", "markov_head_type", RANK_KEYS[config.head], "vocab_size"):
        ours, theirs = getattr(config, name), getattr(stored, name)
        if ours != theirs:
            raise differs("head", path, name, theirs, ours)
    tensors, aliases = hf.open_tensors(folder), head_aliases(stored)
    table = [entry for entry in head_table(stored) if entry.path[1] in TOKEN_TABLES]
    wanted = {entry.name for entry in table}
    others = tuple(name for name in tensors if aliases.get(name, name) not in wanted)
    return load_table(tensors, table, np.float32, skipped=others, aliases=aliases)


def save_drafter(
    folder: str | Path,
    config: AnyConfig,
    params: Params,
    dtype: str = "bfloat16",
    format: str = formats.SERVING,
    verifier: str | None = None,
) -> None:
    """Writes a drafter as a public folder, for servers, for SpecForge's training, or `load_drafter`.

    Every array must be readable by this process: on several hosts, gather the parameters first and write from one.

    Args:
        format, verifier: as for formats.public_config.
    """
    raw = {**formats.public_config(config, format, verifier), "dtype": np.dtype(dtype).name}
    tensors = file_tensors(drafter_table(config), params, dtype)
    if isinstance(config, Eagle3Config):
        tensors |= vocabulary_tensors(config)
    hf.write_folder(folder, tensors, raw)


def stored_config(config: AnyConfig) -> dict[str, Any]:
    """The config.json of a workdir: with the draft vocabulary, which a folder stores as tensors."""
    raw = config.to_dict()
    return {**raw, "draft_tokens": config.draft_tokens.tolist()} if isinstance(config, Eagle3Config) else raw


def parse_stored(raw: dict[str, Any]) -> AnyConfig:
    """The config of what `stored_config` returned; raises DataError for a wrong key."""
    config = config_class(raw).from_dict(raw)
    if isinstance(config, Eagle3Config) and len(config.target_ids) != config.draft_vocab_size:
        raise DataError(
            f"the drafter's config.json has draft_vocab_size {config.draft_vocab_size} and lacks draft_tokens, the"
            " target's ids of these tokens; restore the file as the run wrote it."
        )
    return config


def stored_head(path: str | Path) -> str:
    """The head (names.HEADS) of the drafter at `path`, without reading its weights; paths as for load_drafter."""
    folder = hf.drafter_folder(path)
    raw = hf.read_config(folder)
    with hf.naming(folder):
        kind = config_class(raw, lambda: hf.open_tensors(folder))
    if kind is not DrafterConfig:
        return kind.head
    flat = speculators.is_speculators(raw)
    return hf.parse_config(folder, raw, lambda raw: head_of(speculators.flattened(raw, 1) if flat else raw))
