"""The shapes that a target and its drafter share, read from a parsed config.json and checked before use."""

import dataclasses
from typing import Any

from domino_jax.runtime.errors import ConfigError, quote

# Far above any public model; a config beyond them is damaged or hostile, and is refused before anything is allocated.
LIMITS = {
    "vocab_size": 2_000_000,
    "hidden_size": 65_536,
    "intermediate_size": 524_288,
    "num_hidden_layers": 1_024,
    "num_attention_heads": 1_024,
    "num_key_value_heads": 1_024,
    "head_dim": 1_024,
    "max_position_embeddings": 1 << 31,
}
# Outside of these a norm or a rotation gives NaN, or nothing that was ever trained.
RANGES = {"rms_norm_eps": (1e-12, 1.0), "rope_theta": (1.0, 1e12)}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shapes and constants of a stack of decoder layers; fields are named as in config.json, but for qk_norm.

    qk_norm: per-head RMSNorm on queries and keys, as in Qwen3 and in every drafter; a Llama layer is the same without.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    max_position_embeddings: int
    # Not in the repr, by the other fields of which identities know a target (weights/identity.py).
    qk_norm: bool = dataclasses.field(default=True, kw_only=True, repr=False)

    def layer_fields(self) -> dict[str, Any]:
        """The fields of this class alone."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(DecoderConfig)}


# The advice for a file that contradicts itself: which of two values is right cannot be seen from here.
WRITTEN_WITH = "use the config.json that was written with these weights."
SILU = ("silu", "swish")  # transformers knows it by both names
# Keys that transformers' Qwen3 and Llama read besides the fields, and the values that change nothing. A missing key and
# null change nothing either.
NEUTRAL = {"hidden_act": SILU, "mlp_bias": (False,), "partial_rotary_factor": (1.0,)}


def refuse_unsupported(raw: dict[str, Any], place: str = "") -> None:
    """Raises DataError for the fields of a Qwen3- or Llama-like config.json that would change the forward pass.

    place: as for refuse_values, when raw is a part of the file.
    """
    refuse_values(raw, NEUTRAL, place)
    for part in ("rope_parameters", "rope_scaling"):
        rope = raw.get(part) or {}
        expect(isinstance(rope, dict), f"{place}{part}", rope, "an object")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind != "default":
            raise ConfigError(
                f"asks for RoPE scaling {quote(kind)} in {place}{part}; only rope_type 'default' is supported."
            )
        refuse_values(rope, {"partial_rotary_factor": (1.0,)}, f"{place}{part}.")


def refuse_values(raw: dict[str, Any], neutral: dict[str, tuple], place: str = "") -> None:
    """Raises DataError naming the first key of `neutral` that `raw` sets to another than its neutral values.

    place: the text before the key in the message, as "rope_parameters.".
    """
    for key, values in neutral.items():
        value = raw.get(key)
        if value is not None and value not in values:
            only = f"only {' or '.join(map(repr, values))} is supported" if values else "it is not supported"
            raise ConfigError(f"has {place}{key} {quote(value)}, which changes what the model computes; {only}.")


def read_rope_theta(raw: dict[str, Any]) -> float:
    """rope_theta from the top level, from rope_parameters, or from both when they agree."""
    nested = (raw.get("rope_parameters") or {}).get("rope_theta")
    theta = agree({"rope_theta": raw.get("rope_theta"), "rope_parameters.rope_theta": nested})
    if theta is None:
        raise ConfigError(
            "has neither rope_theta nor rope_parameters.rope_theta; add the value the weights were trained with."
        )
    return _in_range("rope_theta", theta)


def read_decoder_fields(raw: dict[str, Any], *, llama: bool = False) -> dict[str, Any]:
    """The layer shapes that a target and a drafter config.json share, checked against LIMITS.

    llama: head_dim may be absent and is then hidden_size / num_attention_heads, which is what it means in that type. In
    Qwen3 it is a separate value, and usually another one.
    """
    derived = llama and raw.get("head_dim") is None
    shapes = [name for name in LIMITS if not (derived and name == "head_dim")]
    missing = [name for name in [*shapes, "rms_norm_eps"] if raw.get(name) is None]
    if missing:
        raise ConfigError(f"lacks {', '.join(missing)}; these are never guessed.")
    for name in shapes:
        check_size(name, raw[name], LIMITS[name])
    heads, groups = raw["num_attention_heads"], raw["num_key_value_heads"]
    expect(heads % groups == 0, "num_attention_heads", heads, f"a multiple of num_key_value_heads {groups}")
    head_dim = raw["hidden_size"] // raw["num_attention_heads"] if derived else raw["head_dim"]
    expect(head_dim % 2 == 0, "head_dim", head_dim, "an even number: rotary embeddings turn pairs")
    return {
        **{name: raw[name] for name in shapes},
        "head_dim": head_dim,
        "rms_norm_eps": _in_range("rms_norm_eps", raw["rms_norm_eps"]),
        "rope_theta": read_rope_theta(raw),
        "attention_bias": read_switch(raw, "attention_bias"),
    }


def expect(right: bool, name: str, value: Any, expected: str) -> None:
    """Raises ConfigError for a key whose value is not of the kind that is expected."""
    if not right:
        raise ConfigError(f"has {name} {quote(value)}; expected {expected}.")


def agree(stated: dict[str, Any]) -> Any:
    """The value of {key: value, None where it is absent}, keys that mean the same; None without any."""
    stated = {name: value for name, value in stated.items() if value is not None}
    values = list(stated.values())
    if any(value != values[0] for value in values):
        given = " and ".join(f"{name} {quote(value)}" for name, value in stated.items())
        raise ConfigError(f"has {given}, which mean the same; {WRITTEN_WITH}")
    return values[0] if values else None


def check_size(name: str, value: Any, limit: int) -> None:
    expect(type(value) is int and 0 < value <= limit, name, value, f"an integer from 1 to {limit}")


def _in_range(name: str, value: Any) -> float:
    least, most = RANGES[name]
    right = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    expect(right, name, value, f"a number from {least:g} to {most:g}")
    return float(value)


def read_switch(raw: dict[str, Any], name: str) -> bool:
    """A key that is true or false, and false where it is absent or null; a text such as "false" would count as true."""
    value = raw.get(name)
    expect(value is None or isinstance(value, bool), name, value, "true or false")
    return bool(value)
