"""Drafters in the layout of vllm-project/speculators (dflash, dflash2 and domino), read as public ones.

There the layers' shapes are nested in transformer_layer_config, without the values that equal Qwen3Config's defaults;
layer ids are one higher; the Domino head's tensors have a prefix; and copies of the target's embeddings may be stored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from domino_jax.method.config_keys import boolean, integer, listed, section
from domino_jax.method.heads import dflash2_keys
from domino_jax.method.names import DFLASH2, DOMINO
from domino_jax.runtime.errors import DataError, quote
from domino_jax.weights import hf
from domino_jax.weights.target import EMBEDDING, LM_HEAD

HEAD_PREFIX = "logits_correction."
LAYER_IDS = "aux_hidden_state_layer_ids"
# {the copy's name: the target's}; a tied target has no lm_head and its embedding is copied.
COPIES = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": LM_HEAD}
# What only training reads, and the maps of a smaller draft vocabulary, which is refused by draft_vocab_size.
UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")

# Of transformers' Qwen3Config: what a key that transformer_layer_config leaves out means.
_DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
}
_DEFAULT_THETA = 10_000.0
_DOMINO_KEYS = {
    "emb_dim": "logits_correction_emb_dim",
    "gru_hidden_dim": "gru_hidden_dim",
    "pure_draft_prefix_len": "pure_draft_prefix_len",
}


def is_speculators(raw: dict[str, Any]) -> bool:
    """True for the nested layout; a flat config.json with speculators' keys besides is a public one."""
    if raw.get("dflash_config"):
        return False
    return bool(raw.get("transformer_layer_config")) or LAYER_IDS in raw


def flattened(raw: dict[str, Any], target_layers: int) -> dict[str, Any]:
    """The public config.json of a speculators one.

    Args:
        target_layers: layers of the target, which the layout does not store.
    Raises:
        DataError: another algorithm than dflash, dflash2 and domino, or a key that is missing.
    """
    algorithm = raw.get("speculators_model_type")
    if algorithm not in ("dflash", DFLASH2, DOMINO):
        raise DataError(
            f"this drafter is in the speculators layout with speculators_model_type {quote(algorithm)}; only 'dflash',"
            " 'dflash2' and 'domino' are supported."
        )
    layer = section(raw, "transformer_layer_config")
    if layer.get("model_type", "qwen3") != "qwen3":
        raise DataError(
            f"this drafter's transformer_layer_config has model_type {quote(layer['model_type'])}; only 'qwen3' is"
            " supported."
        )
    needed = ["block_size", "mask_token_id", LAYER_IDS, "draft_vocab_size"]
    needed += ["sample_from_anchor", *_DOMINO_KEYS.values()] if algorithm == DOMINO else []
    needed += dflash2_keys.REQUIRED if algorithm == DFLASH2 else []
    missing = [name for name in needed if raw.get(name) is None]
    if missing:
        raise DataError(
            f"the drafter's config.json (speculators, {algorithm}) lacks {', '.join(missing)}; these are never guessed:"
            " add the values it was trained with."
        )
    if algorithm == DFLASH2:
        options = (*dflash2_keys.REQUIRED, *dflash2_keys.TRANSFORMS)
        head = {name: raw[name] for name in options if name in raw}
    else:
        head = {"projector_type": algorithm}
        head |= {name: raw[key] for name, key in _DOMINO_KEYS.items()} if algorithm == DOMINO else {}
    return {
        "architectures": [dflash2_keys.CLASS if algorithm == DFLASH2 else "DFlashDraftModel"],
        **_DEFAULTS,
        **_rope(layer),
        **{key: value for key, value in layer.items() if value is not None},
        **{name: raw[name] for name in ("draft_vocab_size", "target_hidden_size") if name in raw},
        "use_sliding_window": "sliding_attention" in listed("layer_types", layer.get("layer_types") or ()),
        "block_size": raw["block_size"],
        "num_target_layers": target_layers,
        # Full layers always read the whole block there; absent, only the sliding ones are causal, as in public files.
        "is_causal": False if _reads_whole_blocks(raw, algorithm) else None,
        "dflash_config": {
            "mask_token_id": raw["mask_token_id"],
            "target_layer_ids": [integer(LAYER_IDS, index) - 1 for index in listed(LAYER_IDS, raw[LAYER_IDS])],
            "shift_label": bool(boolean(raw, {}, "sample_from_anchor")),
            **head,
        },
    }


def _reads_whole_blocks(raw: dict[str, Any], algorithm: str) -> bool:
    stated = boolean(raw, {}, "sliding_window_non_causal")
    return algorithm == DFLASH2 if stated is None else stated


def _rope(layer: dict[str, Any]) -> dict[str, Any]:
    """The default theta, where the layer's config has none."""
    stated = "rope_theta" in layer or "rope_theta" in section(layer, "rope_parameters")
    return {} if stated else {"rope_theta": _DEFAULT_THETA}


def check_copies(tensors: hf.Tensors, target_path: str | Path | None, copies: Mapping[str, str] = COPIES) -> None:
    """Raises DataError unless the embeddings that a drafter stores are those of the target's folder or hub id.

    Compared in bfloat16: one of the two files may be in float32.

    Args:
        copies: {the copy's name: the target's}.
    """
    stored = {name: original for name, original in copies.items() if name in tensors}
    if not stored:
        return
    if target_path is None:
        raise DataError(f"{tensors.folder} stores {', '.join(stored)}, and no target was given to compare them with.")
    target = hf.open_tensors(hf.resolve_folder(target_path))
    for name, original in stored.items():
        original = EMBEDDING if original not in target else original
        if original not in target or not hf.same_matrix(tensors, name, target, original, "bfloat16"):
            raise DataError(
                f"{tensors.folder}: {name} differs from the target's {original}; a drafter with its own embeddings"
                " cannot be used. Name the target it was trained with."
            )
