"""Single keys of a drafter's config.json: at the top level, in dflash_config, or in both places when they agree."""

import math
from collections.abc import Collection
from typing import Any

from domino_jax.models.decoder_config import WRITTEN_WITH, agree, expect, refuse_unsupported, refuse_values
from domino_jax.runtime.errors import ConfigError, DataError, quote
from domino_jax.runtime.keys import LARGEST

DFLASH = "dflash"
SLIDING = "sliding_attention"  # of layer_types
# Keys with which SGLang, vLLM, modelopt or z-lab's code compute something else with the same tensors, or nearly, and
# the values without effect. These are keys of a layer, of all drafters.
LAYER_VARIANTS = {
    **dict.fromkeys(("attention_value_scale", "logit_scale"), (1.0,)),
    **dict.fromkeys(("attention_sink_bias", "add_swa_attention_sink_bias", "add_full_attention_sink_bias"), (False,)),
    **dict.fromkeys(("rope_interleaved", "use_gemma_norm", "bias"), (False,)),
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style"), (True,)),
    "gating": (False, "disabled"),
    "attn_logit_softcapping": (0.0,),
}
_VARIANTS = LAYER_VARIANTS | {
    "projector_type": (DFLASH,),
    **dict.fromkeys(("selector_rank", "selector_top_k", "markov_rank", "xpress_rank"), (0,)),
    **dict.fromkeys(("enable_confidence_head", "use_confidence_head", "norm_before_fc", "fc_norm"), (False,)),
    **dict.fromkeys(("output_multiplier", "input_embedding_scale"), (1.0,)),
    "final_logit_softcapping": (0.0,),  # servers read 0 as no cap
    "use_aux_hidden_state": (True,),
}


def refuse(wrong: bool, field: str, message: str) -> None:
    """Raises DataError with this message about a field of a drafter's config if something is wrong."""
    if wrong:
        raise DataError(f"{message}.", field)


def missing_keys(kind: str, *names: str) -> DataError:
    return ConfigError(
        f"({kind}) lacks {', '.join(names)}; these are never guessed: add the values it was trained with."
    )


# ------------------------------------------------------------------------------------------------------------ one value


def integer(name: str, value: Any, least: int = -LARGEST, most: int = LARGEST) -> int:
    limits = f"an integer up to {most}" if least < 0 else f"an integer from {least} to {most}"
    expect(type(value) is int and least <= value <= most, name, value, limits)
    return value


def number(name: str, value: Any) -> float:
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    expect(right, name, value, "a finite number above 0")
    return float(value)


def choice(name: str, value: Any, choices: Collection[str]) -> str:
    stated = value.lower() if isinstance(value, str) else value  # as public readers do
    expect(stated in choices, name, value, f"one of {', '.join(choices)}")
    return stated


def read_list(name: str, value: Any) -> list:
    expect(isinstance(value, list | tuple), name, value, "a list")
    return list(value)


def section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside the file; {} when absent."""
    value = {} if raw.get(name) is None else raw[name]
    expect(isinstance(value, dict), name, value, "an object")
    return value


# ---------------------------------------------------------------------------------------------- keys that mean the same


def read_key(raw: dict[str, Any], nested: dict[str, Any], name: str) -> Any:
    """A key that may be at top level, in dflash_config, or in both when they agree; None when absent."""
    return agree({name: raw.get(name), f"dflash_config.{name}": nested.get(name)})


def read_switch(raw: dict[str, Any], nested: dict[str, Any], *names: str) -> bool | None:
    """As `read_key`, for a key that is true or false; names: its name here, then its names in other files."""
    stated = {name: read_key(raw, nested, name) for name in names}
    for name, value in stated.items():
        expect(value is None or isinstance(value, bool), name, value, "true or false")
    return agree(stated)


def read_windows(raw: dict[str, Any], nested: dict[str, Any]) -> tuple[tuple[str, ...], int | None, bool]:
    """(layer_types, the window that sliding layers have, whether they read their whole block where the file does not
    say it). Without a sliding layer in layer_types, vLLM's and modelopt's use_swa makes all of them sliding."""
    kinds = tuple(map(str, read_list("layer_types", raw.get("layer_types") or ())))
    window, used = raw.get("sliding_window"), read_switch(raw, {}, "use_sliding_window")
    whole = bool(read_switch(raw, nested, "use_swa")) and SLIDING not in kinds
    if whole or (SLIDING in kinds and used is not False):
        swa = read_key(raw, nested, "swa_window_size")
        used, window = True, agree({"sliding_window": window, "swa_window_size": swa})
    if window is not None:
        integer("sliding_window", window)
    window = window if window and used else None
    if whole:
        kinds = (SLIDING,) * raw["num_hidden_layers"]
    elif window and not kinds:
        raise ConfigError(f"has sliding_window {window} and no layer_types; add the kinds of its layers.")
    return kinds, window, whole


# ------------------------------------------------------------------------------------------------------- other drafters


def refuse_other_layout(raw: dict[str, Any], nested: dict[str, Any], kind: str, only: dict[str, Any]) -> None:
    """Raises DataError for a key with another value than `only`, {key: value}, gives for all drafters of this kind."""
    for name, value in only.items():
        stated = read_key(raw, nested, name)
        if stated is not None and stated != value:
            fixed = "no such key" if value is None else f"{name} {value}"
            raise ConfigError(
                f"has {name} {quote(stated)} and architectures {quote(raw.get('architectures'))}, but {kind} drafters"
                f" have {fixed}; {WRITTEN_WITH}"
            )


def refuse_variants(raw: dict[str, Any], nested: dict[str, Any], known: Collection[str]) -> None:
    """Raises DataError for a drafter of the same tensors, or nearly, that computes something else.

    known: keys that this drafter's head has.
    """
    refused = {name: values for name, values in _VARIANTS.items() if name not in known}
    refused |= {"target_hidden_size": (raw.get("hidden_size"),)}
    for part, place in ((raw, ""), (nested, "dflash_config.")):
        refuse_values(part, refused, place)
        refuse_unsupported(part, place)
        for rope in ("rope_parameters", "rope_scaling"):
            refuse_values(section(part, rope), {"rope_dim": (raw.get("head_dim"),)}, f"{place}{rope}.")
    drafted, vocab = read_key(raw, nested, "draft_vocab_size"), raw.get("vocab_size")
    refuse(
        drafted not in (None, vocab),
        "draft_vocab_size",
        f"draft_vocab_size {quote(drafted)} and vocab_size {quote(vocab)} differ; a drafter with another vocabulary"
        " than its target is not supported",
    )


def public_keys(config: Any) -> dict[str, Any]:
    """The keys of the decoder layers, which every drafter that has some writes: rope_theta in both places, so that both
    generations of transformers read it."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("rms_norm_eps", "rope_theta", "max_position_embeddings", "vocab_size")
    return {
        **{name: getattr(config, name) for name in names},
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
