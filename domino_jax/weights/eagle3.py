"""EAGLE-3 drafters between their public folders and their parameters, the draft vocabulary included."""

from pathlib import Path
from typing import Any

import numpy as np

from domino_jax.method.heads.eagle3_config import Eagle3Config
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.fit import check_fits
from domino_jax.weights.speculators import UNUSED, check_copies
from domino_jax.weights.target import EMBEDDING, Entry, Stored, linear, norm, prefix_hint

LAYER, VLLM_LAYER = "midlayer.", "layers.0."
COPIES = {"embed_tokens.weight": EMBEDDING}
OFFSETS, MEMBERS = VOCABULARY = ("d2t", "t2d")


def eagle3_table(config: Eagle3Config) -> list[Entry]:
    """Every tensor of floats."""
    c, layer, attention = config, ("midlayer",), ("midlayer", "self_attn")
    width, queries, keys = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    return [
        *([norm("input_norm", ("input_norm",), 3 * width)] if c.norm_before_fc else []),
        linear("fc", ("fc",), width, 3 * width),
        *(norm(f"{LAYER}{name}", (*layer, name), width) for name in norms),
        linear(f"{LAYER}self_attn.q_proj", (*attention, "q_proj"), queries, 2 * width),
        linear(f"{LAYER}self_attn.k_proj", (*attention, "k_proj"), keys, 2 * width),
        linear(f"{LAYER}self_attn.v_proj", (*attention, "v_proj"), keys, 2 * width),
        linear(f"{LAYER}self_attn.o_proj", (*attention, "o_proj"), width, queries),
        linear(f"{LAYER}mlp.gate_proj", (*layer, "mlp", "gate_proj"), c.intermediate_size, width),
        linear(f"{LAYER}mlp.up_proj", (*layer, "mlp", "up_proj"), c.intermediate_size, width),
        linear(f"{LAYER}mlp.down_proj", (*layer, "mlp", "down_proj"), width, c.intermediate_size),
        norm("norm", ("norm",), width),
        linear("lm_head", ("lm_head",), c.draft_vocab_size, width),
    ]


def open_eagle3(
    tensors: hf.Tensors, raw: dict[str, Any], target: Qwen3Config, target_path: str | Path | None
) -> Stored:
    """The drafter of a folder whose flat config.json is `raw`; the others as for load_drafter."""
    config = hf.parse_config(tensors.folder, raw, lambda raw: Eagle3Config.from_dict(raw, target.num_hidden_layers))
    check_fits(config, target)
    config = config.with_draft_tokens(_draft_tokens(tensors, config))
    check_copies(tensors, target_path, COPIES)
    table = eagle3_table(config)
    aliases = {name.replace(LAYER, VLLM_LAYER): name for name in (entry.name for entry in table) if LAYER in name}
    return Stored(config, table, (*COPIES, *VOCABULARY, *UNUSED), aliases)


def _draft_tokens(tensors: hf.Tensors, config: Eagle3Config) -> np.ndarray:
    """The target's ids of the draft vocabulary, from d2t, against which t2d is checked."""
    sizes = {OFFSETS: (config.draft_vocab_size, "I64"), MEMBERS: (config.vocab_size, "BOOL")}
    whole = config.draft_vocab_size == config.vocab_size
    if whole and not set(VOCABULARY) & set(tensors):
        return np.arange(config.vocab_size)
    missing = [name for name in VOCABULARY if name not in tensors]
    if missing:
        raise DataError(
            f"{tensors.folder} lacks {' and '.join(missing)}, which map its {config.draft_vocab_size} draft tokens to"
            f" the target's {config.vocab_size}.{prefix_hint(tensors, VOCABULARY)}"
        )
    for name, (size, kind) in sizes.items():
        stored = tensors[name]
        if stored.shape != (size,) or stored.dtype != kind:
            raise DataError(
                f"{tensors.folder}: {name} is {stored.dtype} {list(stored.shape)}, but config.json describes {kind}"
                f" {[size]} (draft_vocab_size {config.draft_vocab_size}, vocab_size {config.vocab_size})."
            )
    tokens = np.arange(config.draft_vocab_size) + tensors.read(OFFSETS)
    config.with_draft_tokens(tokens)  # refuses ids that do not fit
    if not np.array_equal(np.flatnonzero(tensors.read(MEMBERS)), tokens):
        raise DataError(f"{tensors.folder}: {OFFSETS} and {MEMBERS} name different tokens; d2t holds offsets.")
    return tokens


def vocabulary_tensors(config: Eagle3Config) -> dict[str, np.ndarray]:
    """d2t and t2d as they are stored."""
    tokens = np.asarray(config.target_ids, np.int64)
    members = np.zeros(config.vocab_size, bool)
    members[tokens] = True
    return {OFFSETS: tokens - np.arange(len(tokens)), MEMBERS: members}
