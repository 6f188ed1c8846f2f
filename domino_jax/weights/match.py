"""Whether the tensors of a folder are the rows of a table, and why they are not where another program wrote them."""

import re
from collections.abc import Mapping

from domino_jax.models.moe import ROUTER
from domino_jax.models.tables import EMBEDDING, LM_HEAD, Entry
from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.safetensors_file import FLOATS

# Buffers that older writers saved with the weights; they follow from rope_theta.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
_FUSED = (".experts.gate_up_proj", ".gate_up_proj.", ".qkv_proj.")  # transformers in memory, servers
_MLX = (".switch_mlp.", ".biases")
# Endings of tensors that make quantized matrices in formats which are not read.
_SMALL = ("F8_E4M3", "F8_E5M2", "I8", "U8", "U32")  # types of such matrices; MLX has the last
_PACKED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".absmax", ".SCB")


def match_names(
    tensors: hf.Tensors, table: list[Entry], skipped: tuple[str, ...], aliases: Mapping[str, str], instead: str
) -> dict[str, str]:
    """{name in the table: name in the folder}; one DataError for all that is missing, unknown, doubled or misshaped.

    Args: as for target.load_table.
    """
    expected = {name: entry for entry in table for name in entry.names}
    stored_names: dict[str, str] = {}
    wrong: dict[str, list[str]] = {"missing": [], "unknown": [], "twice": [], "misshaped": []}
    for name in tensors:
        if name in skipped or _IGNORED.fullmatch(name):
            continue
        target = aliases.get(name, name)
        if target not in expected:
            wrong["unknown"].append(name)
        elif target in stored_names:
            wrong["twice"].append(f"{stored_names[target]} = {name}")
        else:
            stored_names[target] = name
            stored, wanted, kind = tensors[name], expected[target].stored_shape, expected[target].stored
            fits = stored.dtype == kind if kind else stored.dtype in FLOATS
            if stored.shape != wanted or not fits:
                types = ("", "") if fits else (f"{stored.dtype} ", f"{kind or 'floating'} ")
                wrong["misshaped"].append(f"{name} {types[0]}{list(stored.shape)} for {types[1]}{list(wanted)}")
    wrong["missing"] = [name for name in expected if name not in stored_names]
    if any(wrong.values()):
        floating = [stored_names[name] for name, entry in expected.items() if name in stored_names and not entry.stored]
        if reason := _other_format(tensors, floating, wrong["unknown"], instead):
            raise DataError(f"{tensors.folder}: {reason}")
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in wrong.items() if names)
        untied = LM_HEAD in wrong["missing"] and EMBEDDING in expected
        hint = " Its tie_word_embeddings is false, so it needs an lm_head." if untied else ""
        lines = [f"{tensors.folder}: the tensors are not those that config.json describes ({counts}).{hint}"]
        lines += [f"{kind}: {hf.list_names(names)}" for kind, names in wrong.items() if names]
        raise DataError("\n".join(lines))
    return stored_names


def _other_format(tensors: hf.Tensors, floating: list[str], unknown: list[str], instead: str) -> str | None:
    """Why another program's tensors do not fit the table; None where no reason is known.

    floating: tensors that have to be floating.  unknown: names that are in no table.
    """
    quantized = [name for name in floating if tensors[name].dtype in _SMALL]
    if fused := [name for name in unknown if any(part in name for part in _FUSED)]:
        several = "all experts of a layer" if ".experts." in fused[0] else "several matrices"
        return (
            f"{several} are fused into one tensor ({fused[0]}), and they are read from separate ones. Use the folder"
            " that the model's authors published."
        )
    if mlx := [name for name in unknown if any(part in name for part in _MLX)]:
        return f"{mlx[0]} is a tensor of MLX, whose folders are not read. {instead}"
    quantized += [name for name in unknown if name.endswith(_PACKED)]
    for name in sorted(quantized, key=lambda name: f".mlp.{ROUTER}." not in name):  # routers first
        part = "router" if f".mlp.{ROUTER}." in name else "matrix"
        return f"the {part} {name} is quantized ({tensors[name].dtype}), and it must be floating. {instead}"
    return None
