"""Targets in eight bits: how a folder stores its matrices (quantization_config), or what a load makes of floating ones.

Only weights are read. A folder that describes quantized activations as well (FP8 dynamic, int8 W8A8) runs with
activations in the compute type, so its text follows from its weights alone.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from domino_jax.models.decoder_config import expect
from domino_jax.models.moe import ROUTER
from domino_jax.models.quantized import TILE
from domino_jax.models.tables import Entry
from domino_jax.runtime.errors import ConfigError, DataError, quote

INT8, FP8 = "int8", "float8_e4m3fn"
SECTION = "quantization_config"
SUPPORTED = (
    "Supported are Qwen's FP8 folders (as Qwen/Qwen3-8B-FP8), compressed-tensors folders in FP8 or int8 with one scale"
    " per channel (as RedHatAI/Qwen3-8B-FP8-dynamic) or in FP8 by blocks (as RedHatAI/Qwen3-8B-FP8-block), and bfloat16"
    " folders, also with --config.target.quantize=int8."
)


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Which matrices of a target are in eight bits, and how a folder stores them.

    dtype: of the values, INT8 or FP8.  tiles: a scale for each tile of 128 × 128 values, else for each output channel.
    scale: the last word of the name of its tensor.
    floating: modules whose matrices are not in eight bits, by a part of the name, or by a regular expression after
    "re:".
    """

    dtype: str
    tiles: bool = False
    scale: str = "weight_scale"
    floating: tuple[str, ...] = ("lm_head",)

    def holds(self, entry: Entry) -> bool:
        """Whether the matrix of an entry is in eight bits; the embedding and routers never are."""
        if entry.path[-1] != "kernel" or entry.path[-2] == ROUTER:
            return False
        return not any(_names(each, module_of(entry)) for each in self.floating)

    def table(self, table: list[Entry]) -> list[Entry]:
        """The table of a folder of this scheme, from the table of a floating one."""
        return [row for entry in table for row in (self._rows(entry) if self.holds(entry) else (entry,))]

    def _rows(self, entry: Entry) -> tuple[Entry, Entry]:
        outputs, inputs = entry.shape
        if self.tiles and (outputs % TILE or inputs % TILE):
            raise ConfigError(
                f"describes {entry.name} as {outputs} × {inputs}, which tiles of {TILE} × {TILE} do not"
                f" divide. {SUPPORTED}"
            )
        scales = (outputs // TILE, inputs // TILE) if self.tiles else (outputs, 1)
        stored, module, path = {INT8: "I8", FP8: "F8_E4M3"}[self.dtype], module_of(entry), entry.path
        return (
            Entry(entry.name, (*path, "q"), entry.shape, True, self.dtype, stored, entry.experts),
            Entry(f"{module}.{self.scale}", (*path, "scale"), scales, True, "float32", experts=entry.experts),
        )


# What target.quantize makes; with _layers the lm_head stays floating.
QUANTIZE = {
    "int8": Scheme(INT8, floating=()),
    "fp8": Scheme(FP8, floating=()),
    "int8_layers": Scheme(INT8),
    "fp8_layers": Scheme(FP8),
}
# What the config.json of Qwen/Qwen3-8B-FP8 and its sisters holds.
PUBLIC_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [TILE, TILE]}
# By the format of compressed-tensors and the type of the weights; naive-quantized stores the same as the other two.
FORMATS = {
    ("float-quantized", "float"): Scheme(FP8),
    ("naive-quantized", "float"): Scheme(FP8),
    ("naive-quantized", "int"): Scheme(INT8),
    ("int-quantized", "int"): Scheme(INT8),
}


def module_of(entry: Entry) -> str:
    return entry.name.removesuffix(".weight")


def _names(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return f".{pattern}." in f".{module}."


# --------------------------------------------------------------------------------------------- quantization_config


def read_scheme(raw: Mapping[str, Any], quantize: str | None = None) -> Scheme | None:
    """The scheme of a parsed config.json, or of target.quantize; None of a target that is floating.

    Raises DataError: a scheme that is not supported, or both.
    """
    section = _object(raw, SECTION)
    method = section.get("quant_method")
    mlx = raw.get("quantization") or (section if method is None and "bits" in section else None)
    if mlx:
        raise ConfigError(f"has quantization {quote(mlx)}, as quantized MLX folders have. {SUPPORTED}")
    if not section:
        return QUANTIZE[quantize] if quantize else None
    if quantize:
        raise ConfigError(
            f"has {SECTION} with quant_method {quote(method)}, so the target is quantized already, but"
            f" target.quantize is {quantize}; leave it out, or name the bfloat16 folder."
        )
    if method == "fp8":
        return _read_fp8(section)
    if method == "compressed-tensors":
        return _read_compressed(section)
    raise _unsupported("quant_method", method)


def _object(part: Mapping[str, Any], key: str, place: str = "") -> Mapping[str, Any]:
    """The object under a key, empty where it is missing; place: what the key's name begins with in a message."""
    value = part.get(key) or {}
    expect(isinstance(value, dict), f"{place}{key}", value, f"an object. {SUPPORTED.rstrip('.')}")
    return value


def _unsupported(key: str, value: Any) -> DataError:
    return ConfigError(f"has {SECTION}.{key} {quote(value)}, which is not supported. {SUPPORTED}")


def _expect(part: Mapping[str, Any], place: str, allowed: Mapping[str, tuple], free: tuple[str, ...]) -> None:
    """Refuses a value that is not allowed, and a key that is neither in `allowed` nor free and has a value."""
    for key in (*allowed, *(key for key in part if key not in allowed and key not in free)):
        if part.get(key) not in allowed.get(key, (None,)):
            raise _unsupported(f"{place}{key}", part.get(key))


def _read_fp8(section: Mapping[str, Any]) -> Scheme:
    """Qwen's FP8 folders; "weight_scale_inv" is multiplied with, in spite of its name."""
    allowed = {
        "quant_method": ("fp8",),
        "weight_block_size": ([TILE, TILE],),
        "activation_scheme": ("dynamic",),
        "fmt": (None, "e4m3"),
        "scale_fmt": (None, "float"),
        "expert_dtype": (None, "fp8"),
        "dequantize": (None, False),
        "modules_to_convert": (None, []),
    }
    _expect(section, "", allowed, ("modules_to_not_convert",))
    floating = _patterns(section, "modules_to_not_convert")
    return Scheme(FP8, tiles=True, scale="weight_scale_inv", floating=("lm_head", *floating))


def _read_compressed(section: Mapping[str, Any]) -> Scheme:
    """Folders of llm-compressor: one group, all linear maps but the ignored ones, symmetric.

    A scale is for a channel, or in FP8 for a block of 128 × 128 values.
    """
    sparsity = _object(section, "sparsity_config", f"{SECTION}.")
    allowed = {
        "quant_method": ("compressed-tensors",),
        "format": tuple(kind for kind, _ in FORMATS),
        "quantization_status": (None, "compressed", "frozen"),  # of either the tensors are in eight bits
        "kv_cache_scheme": (None,),
        "transform_config": (None, {}),
        "moe_sparsity_config": (None,),
        "sparsity_config": (None, {}, sparsity if sparsity.get("format") == "dense" else None),
    }
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _unsupported("config_groups", groups)
    [name] = groups
    place = f"config_groups.{name}."
    group = _object(groups, name, f"{SECTION}.config_groups.")
    weights = _object(group, "weights", f"{SECTION}.{place}")
    # First what the weights are: of an unsupported folder this names the kind.
    blocks = weights.get("strategy") == "block"
    strategies = ("channel", "block") if weights.get("type") == "float" else ("channel",)
    bits = {"num_bits": (8,), "type": ("int", "float"), "strategy": strategies, "symmetric": (True,)}
    settings = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    plain = {"dynamic": (None, False), "group_size": (None,), "actorder": (None, False)}
    plain |= {"block_structure": ([TILE, TILE] if blocks else None,)}
    _expect(weights, f"{place}weights.", bits | plain, settings)
    _expect(section, "", allowed, ("config_groups", "ignore", "version", "global_compression_ratio"))
    of_format = {kind: scheme for (name, kind), scheme in FORMATS.items() if name == section["format"]}
    _expect(weights, f"{place}weights.", {"type": tuple(of_format)}, tuple(weights))
    ways = {"targets": (["Linear"],), "output_activations": (None,), "format": (None, section["format"])}
    _expect(group, place, ways, ("weights", "input_activations"))
    inputs = _object(group, "input_activations", f"{SECTION}.{place}") or {"dynamic": True}
    _expect(inputs, f"{place}input_activations.", {"dynamic": (True,)}, tuple(inputs))
    return dataclasses.replace(of_format[weights["type"]], tiles=blocks, floating=_patterns(section, "ignore"))


def _patterns(section: Mapping[str, Any], key: str) -> tuple[str, ...]:
    patterns = section.get(key) or []
    try:
        for pattern in patterns:
            re.compile(pattern.removeprefix("re:"))
    except (TypeError, AttributeError, re.error) as error:
        text = f"{SECTION}.{key} {quote(patterns)}; expected a list of module names and patterns ({error})"
        raise ConfigError(f"has {text}.") from None
    return tuple(patterns)
