"""Drafters in the layout of vllm-project/speculators, read as public ones.

There the layers' shapes are nested in transformer_layer_config, without the values that equal the defaults of its
model_type; layer ids are one higher; the Domino head's tensors have a prefix; and copies of the target's embeddings may
be stored.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from domino_jax.method.config import CONVOLUTION, DrafterConfig
from domino_jax.method.config_keys import LAYER_VARIANTS, integer, missing_keys, read_list, read_switch, section
from domino_jax.method.drafters import CONFIGS
from domino_jax.method.fields import fields_of
from domino_jax.method.heads import eagle3
from domino_jax.models.tables import EMBEDDING
from domino_jax.runtime.errors import DataError, quote
from domino_jax.weights import hf

LAYER_IDS = "aux_hidden_state_layer_ids"
# Tensors that only training reads, and the maps of a smaller draft vocabulary: EAGLE-3 reads them itself, and block
# drafters with such a vocabulary are refused by draft_vocab_size.
UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t")

# What a key that transformer_layer_config leaves out means: the defaults of transformers' configs, by model_type. In
# Llama two keys follow from others.
_COMMON = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_QWEN3 = {"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "head_dim": 128}
_DEFAULTS = {
    "qwen3": _COMMON | _QWEN3 | {"max_position_embeddings": 32_768},
    "llama": _COMMON | {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
}
_DEFAULT_THETA = 10_000.0
_KEPT = (*LAYER_VARIANTS, "target_hidden_size")  # keys of other programs, which a reader refuses or lets pass


class Layout(NamedTuple):
    """The folder of a block drafter there.

    needed: keys that it must have, beside the head's fields.  names: {field: its name there, if another one}.
    units: {field: the field in whose units it is stated there}.  whole_blocks: sliding layers read the whole block
    where the file does not say it.
    """

    head: str
    needed: tuple[str, ...] = ()
    names: Mapping[str, str] = {}
    units: Mapping[str, str] = {}
    whole_blocks: bool = False


# {speculators_model_type: the folder}.
LAYOUTS = {
    "dflash": Layout("none"),
    "domino": Layout("domino", ("sample_from_anchor",), {"emb_dim": "logits_correction_emb_dim"}),
    "dspark": Layout("markov", ("sample_from_anchor",)),
    "dflash2": Layout("dflash2", CONVOLUTION, whole_blocks=True),
    "xpress": Layout(
        "xpress",
        names={"xpress_mlp_hidden": "xpress_mlp_ratio", "xpress_num_passes": "num_jacobi_passes"},
        units={"xpress_mlp_hidden": "xpress_rank"},
    ),
}
# {head: {how names of its tensors begin: how they begin here, or in vLLM}}.
OTHER_NAMES = {
    "xpress": {
        "xpress_head.w1": "refiner_head.token_embed",
        "xpress_head.w2": "refiner_head.readout",
        "xpress_head.mix.L": "refiner_head.mix_l",
        **{f"xpress_head.mlp.{part}_proj": f"refiner_head.mlp_{part}" for part in ("gate", "up", "down")},
        "xpress_head.": "refiner_head.",
    },
    "eagle3": {"midlayer.": "layers.0."},
}


def is_speculators(raw: dict[str, Any]) -> bool:
    """True for the nested layout; a flat config.json with speculators' keys besides is a public one."""
    if raw.get("dflash_config") or raw.get("eagle_config"):
        return False
    return "speculators_model_type" in raw or bool(raw.get("transformer_layer_config")) or LAYER_IDS in raw


def flattened(raw: dict[str, Any], target_layers: int | None = None) -> dict[str, Any]:
    """The public config.json of a speculators one.

    Args:
        target_layers: layers of the target, which the layout does not store; only the kind is known without them.
    Raises DataError: an algorithm of no known kind, or a key that is missing.
    """
    algorithm = raw.get("speculators_model_type")
    if algorithm == "eagle3":
        return _flattened_eagle3(raw)
    if not isinstance(algorithm, str) or algorithm not in LAYOUTS:
        names = ", ".join(map(repr, (*LAYOUTS, "eagle3")))
        raise DataError(f"this drafter has speculators_model_type {quote(algorithm)}; supported are {names}.")
    layout = LAYOUTS[algorithm]
    drafter = CONFIGS[layout.head]
    names = {entry.name: layout.names.get(entry.name, entry.name) for entry in fields_of(drafter, DrafterConfig)}
    _demand(raw, "block_size", "mask_token_id", LAYER_IDS, "draft_vocab_size", *layout.needed, *names.values())
    whole_blocks = read_switch(raw, {}, "sliding_window_non_causal")
    layer = _layer(raw, "qwen3")
    return {
        **layer,
        **{key: raw[key] for key in _KEPT if key in raw},
        "draft_vocab_size": raw["draft_vocab_size"],
        "architectures": [drafter.architecture],
        "use_sliding_window": "sliding_attention" in read_list("layer_types", layer.get("layer_types") or ()),
        "block_size": raw["block_size"],
        "num_target_layers": target_layers,
        # Full layers always read the whole block there; absent, only the sliding ones are causal, as in public files.
        "is_causal": False if (layout.whole_blocks if whole_blocks is None else whole_blocks) else None,
        "dflash_config": {
            "mask_token_id": raw["mask_token_id"],
            "target_layer_ids": [integer(LAYER_IDS, index) - 1 for index in read_list(LAYER_IDS, raw[LAYER_IDS])],
            "sample_from_anchor": bool(read_switch(raw, {}, "sample_from_anchor")),
            **_head_keys(drafter, raw, names, layout.units),
        },
    }


def _head_keys(
    drafter: type[DrafterConfig], raw: dict[str, Any], names: Mapping[str, str], units: Mapping[str, str]
) -> dict[str, Any]:
    """The head's keys of dflash_config; names: {field: its name here}.  units: as in Layout."""
    kind = raw["speculators_model_type"]
    keys = {"projector_type": kind} if kind in drafter.known_by else {}
    for name, theirs in names.items():
        unit = units.get(name)
        keys[name] = integer(theirs, raw[theirs]) * integer(unit, keys[unit]) if unit else raw[theirs]
    return keys | {name: raw[name] for name in (*drafter.needed, *drafter.own_keys) if name in raw}


def _flattened_eagle3(raw: dict[str, Any]) -> dict[str, Any]:
    """`flattened` for EAGLE-3, whose layer ids count as at the top level of flat files."""
    # Readers disagree on what a missing norm_before_residual means.
    _demand(raw, "draft_vocab_size", "norm_before_residual")
    keys = (*eagle3.NORMS, eagle3.LAYER_IDS, "fc_norm", "draft_vocab_size", *_KEPT)
    return {
        **_layer(raw, "llama"),
        **{name: raw[name] for name in ("speculators_model_type", *keys) if raw.get(name) is not None},
        "architectures": [eagle3.ARCHITECTURE],
    }


def _demand(raw: dict[str, Any], *names: str) -> None:
    missing = [name for name in names if raw.get(name) is None]
    if missing:
        raise missing_keys(f"speculators, {raw['speculators_model_type']}", *missing)


def _layer(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """transformer_layer_config with the values that it leaves out."""
    layer = {key: value for key, value in section(raw, "transformer_layer_config").items() if value is not None}
    # Without a model_type speculators takes a layer for Qwen3's.
    if layer.get("model_type", "qwen3") != kind:
        raise DataError(
            f"this drafter's transformer_layer_config has model_type {quote(layer.get('model_type'))}; only {kind!r} is"
            f" supported in a drafter of speculators_model_type {raw['speculators_model_type']!r}."
        )
    layer = {**_DEFAULTS[kind], **layer}
    if kind == "llama":
        layer.setdefault("num_key_value_heads", layer["num_attention_heads"])
    if "rope_theta" not in layer and "rope_theta" not in section(layer, "rope_parameters"):
        layer["rope_theta"] = _DEFAULT_THETA
    return layer


def check_copies(tensors: hf.Tensors, target_path: str | Path | None, copies: Mapping[str, str]) -> None:
    """Raises DataError unless the embeddings that a drafter stores equal the embeddings of its target.

    Compared in bfloat16: one of the two files may be in float32.

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
