"""The target between its public folder and its parameters: one table of names, total in both directions.

A table row names which tensor of the file is which leaf of the parameter tree and whether it is stored transposed. The
rows follow from the module, for drafters as well (models/tables.py). Reading or writing anything the table does not
list, or less than it lists, is an error: no leaf ever keeps a random initial value.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.models import quantized
from domino_jax.models.moe import ROUTER
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.models.tables import EMBEDDING, LM_HEAD, Entry, table_of
from domino_jax.runtime.errors import DataError, quote
from domino_jax.runtime.progress import Progress
from domino_jax.weights import hf
from domino_jax.weights.quantization import SUPPORTED, Scheme, read_scheme
from domino_jax.weights.safetensors_file import FLOATS, is_finite

Params = dict[str, Any]
# Buffers that older writers saved with the weights; they follow from rope_theta.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
_FUSED = (".experts.gate_up_proj", ".gate_up_proj.", ".qkv_proj.")  # transformers in memory, servers
_PACKED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".absmax")  # of quantized matrices
# Where leaves go: None (the default device), one sharding for all of them, or (path, shape) → sharding.
Sharding = None | jax.sharding.Sharding | Callable[[tuple[str, ...], tuple[int, ...]], Any]


@functools.lru_cache(maxsize=16)
def target_table(config: Qwen3Config) -> list[Entry]:
    """Every tensor of a floating target of this config."""
    kinds = {}  # layers with the same experts are alike, and tracing takes time
    for index in range(config.num_hidden_layers):
        experts = config.experts_of(index)
        if experts not in kinds:
            every = experts and dataclasses.replace(experts, decoder_sparse_step=1, mlp_only_layers=())
            model = Qwen3(dataclasses.replace(config, num_hidden_layers=1, experts=every))
            # Also the arguments as shapes only: the mesh of a dry run has devices that can compute nothing.
            shapes = jax.eval_shape(lambda model=model: model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))[
                "params"
            ]
            kinds[experts] = shapes.pop("layers_0")
    shapes |= {f"layers_{index}": kinds[config.experts_of(index)] for index in range(config.num_hidden_layers)}
    return table_of(shapes, {LM_HEAD: LM_HEAD, "": "model."})


def target_shapes(config: Qwen3Config, dtype: Any, scheme: Scheme | None = None) -> dict:
    """The parameters of a target as shapes."""
    table = target_table(config)
    shapes: Params = {}
    for entry in scheme.table(table) if scheme else table:
        shape = jax.ShapeDtypeStruct(entry.leaf_shape, np.dtype(entry.dtype or dtype))
        _node(shapes, entry.path)[entry.path[-1]] = shape
    return shapes


def _node(params: Params, path: tuple[str, ...]) -> Params:
    """The dict in a tree that holds the leaf of this path, made if it is not there."""
    for parent in path[:-1]:
        params = params.setdefault(parent, {})
    return params


def load_table(
    tensors: hf.Tensors,
    table: list[Entry],
    dtype: Any,
    sharding: Sharding = None,
    *,
    skipped: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None,
    quantize: Scheme | None = None,
    instead: str = SUPPORTED,
) -> Params:
    """Reads every row of the table, tensor by tensor, straight to its device and in `dtype`.

    Args:
        skipped: names of the file that are not wanted.  aliases: {other name in the file: name in the table}.
        quantize: which floating matrices to have in eight bits; each is rounded as it is stored, before the next one.
        instead: which other folders are read, for messages about matrices that are quantized otherwise.
    """
    stored_names = _match_names(tensors, table, skipped, aliases or {}, instead)
    params: Params = {}
    progress = Progress("loading weights", len(table))
    for entry in table:
        place = sharding(entry.path, entry.leaf_shape) if callable(sharding) else sharding
        rounded = quantize is not None and quantize.holds(entry)
        leaf_dtype = None if rounded else np.dtype(entry.dtype or dtype)
        names = [stored_names[name] for name in entry.names]
        leaf = _load_leaf(tensors, names, entry, leaf_dtype, place)
        if rounded:
            leaf = jax.block_until_ready(quantize_leaf(leaf, quantize.dtype, sharding, entry.path))
        _node(params, entry.path)[entry.path[-1]] = leaf
        progress.advance(1)
    return params


def _match_names(
    tensors: hf.Tensors, table: list[Entry], skipped: tuple[str, ...], aliases: Mapping[str, str], instead: str
) -> dict[str, str]:
    """{name in the table: name in the folder}; one DataError for all that is missing, unknown, doubled or misshaped."""
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
            stored, wanted, kind = tensors[name], expected[target].shape, expected[target].stored
            fits = stored.dtype == kind if kind else stored.dtype in FLOATS
            if stored.shape != wanted or not fits:
                types = ("", "") if fits else (f"{stored.dtype} ", f"{kind or 'floating'} ")
                wrong["misshaped"].append(f"{name} {types[0]}{list(stored.shape)} for {types[1]}{list(wanted)}")
    wrong["missing"] = [name for name in expected if name not in stored_names]
    if any(wrong.values()):
        floating = [name for name in stored_names.values() if not expected[aliases.get(name, name)].stored]
        if reason := _other_format(tensors, floating, wrong["unknown"], instead):
            raise DataError(f"{tensors.folder}: {reason}")
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in wrong.items() if names)
        untied = LM_HEAD in wrong["missing"] and EMBEDDING in expected
        hint = " Its tie_word_embeddings is not true, so it needs an lm_head." if untied else ""
        lines = [f"{tensors.folder}: the tensors are not as config.json describes them ({counts}).{hint}"]
        lines += [f"{kind}: {hf.list_names(names)}" for kind, names in wrong.items() if names]
        raise DataError("\n".join(lines))
    return stored_names


def _other_format(tensors: hf.Tensors, floating: list[str], unknown: list[str], instead: str) -> str | None:
    """Explains why another program's tensors do not fit; None where no reason is known.

    floating: tensors that have to be floating.  unknown: names that are in no table.
    """
    if fused := [name for name in unknown if any(part in name for part in _FUSED)]:
        return f"{fused[0]} is several matrices in one tensor; use the folder that the model's authors published."
    quantized = [name for name in floating if tensors[name].dtype in ("F8_E4M3", "F8_E5M2", "I8", "U8", "U32")]
    quantized += [name for name in unknown if name.endswith(_PACKED)]
    for name in sorted(quantized, key=lambda name: f".mlp.{ROUTER}." not in name):  # routers first
        part = "router" if f".mlp.{ROUTER}." in name else "matrix"
        return f"the {part} {name} is quantized ({tensors[name].dtype}), and it must be floating. {instead}"
    return None


def quantize_leaf(leaf: jax.Array, dtype: str, sharding: Sharding, path: tuple[str, ...]) -> dict[str, jax.Array]:
    """A floating matrix in eight bits; path: of the leaf."""
    places = None
    if callable(sharding):
        shapes = {"q": leaf.shape, "scale": (*leaf.shape[:-2], 1, leaf.shape[-1])}
        places = {name: sharding((*path, name), shape) for name, shape in shapes.items()}
    return jax.jit(quantized.quantize, static_argnums=1, out_shardings=places)(leaf, dtype)


def _load_leaf(
    tensors: hf.Tensors, names: list[str], entry: Entry, dtype: np.dtype | None, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """One leaf on its device or devices; a device's slice is all that is read for it. dtype: None as it is stored."""

    def read(index: tuple[slice, ...] = ()) -> np.ndarray:
        if not entry.experts:
            return read_tensor(names[0], index)
        experts, *rest = index or (slice(None),)
        return np.stack([read_tensor(name, tuple(rest)) for name in names[experts]])

    def read_tensor(name: str, index: tuple[slice, ...]) -> np.ndarray:
        array = tensors.read(name, index[::-1] if entry.transpose else index)
        array = array.T if entry.transpose else array
        with np.errstate(over="ignore"):  # judged below, with the tensor's name
            cast = np.asarray(array, dtype=dtype, order="C")
        if cast.dtype.itemsize < array.dtype.itemsize and not is_finite(cast):
            raise DataError(f"{tensors.folder}: tensor {quote(name)} holds values beyond the range of {dtype}.")
        return cast

    if sharding is None:
        leaf = jax.device_put(read())
    else:
        leaf = jax.make_array_from_callback(entry.leaf_shape, sharding, read)
    # Transfers are asynchronous; without waiting, the host would pile up tensors faster than a device takes them.
    return leaf.block_until_ready()


def file_tensors(table: list[Entry], params: Params, dtype: Any) -> dict[str, np.ndarray]:
    """The table's tensors in file layout and `dtype`, in this host's memory.

    Raises DataError for parameters that are missing, unknown or of another shape.
    """
    leaves = {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    wrong = dict(shapes.items() ^ {entry.path: entry.leaf_shape for entry in table}.items())
    if wrong:
        names = hf.list_names(["/".join(path) for path in wrong])
        raise DataError(f"these parameters are not as the config describes them, and are not written: {names}.")
    tensors = {}
    for entry in table:
        array = np.asarray(leaves[entry.path])
        for name, part in zip(entry.names, array if entry.experts else [array], strict=True):
            tensors[name] = np.asarray(part.T if entry.transpose else part, dtype=dtype, order="C")
    return tensors


def read_target_config(path: str | Path) -> Qwen3Config:
    """The shapes of a local folder's or hub id's target, without its weights."""
    folder = hf.resolve_folder(path)
    with hf.naming(folder):
        return Qwen3Config.from_dict(hf.read_config(folder))


def read_target_scheme(path: str | Path, quantize: str | None = None) -> Scheme | None:
    """Which matrices of a target are in eight bits, by its folder or by target.quantize; paths as above."""
    folder = hf.resolve_folder(path)
    with hf.naming(folder):
        return read_scheme(hf.read_config(folder), quantize)


def load_target(
    path: str | Path, dtype: Any, sharding: Sharding = None, quantize: str | None = None
) -> tuple[Qwen3Config, Params]:
    """A target from a local folder or a hub id: its config, and its parameters in `dtype` on their devices.

    quantize: a key of QUANTIZE.
    """
    folder = hf.resolve_folder(path)
    config, scheme = read_target_config(folder), read_target_scheme(folder, quantize)
    tensors, table = hf.open_tensors(folder), target_table(config)
    skipped: tuple[str, ...] = ()
    if scheme and not quantize:
        table = scheme.table(table)
    if config.tie_word_embeddings and LM_HEAD in tensors:
        _check_tied(tensors)
        skipped = (LM_HEAD,)
    choices = {"skipped": skipped, "quantize": scheme if quantize else None}
    return config, load_table(tensors, table, dtype, sharding, **choices)


def _check_tied(tensors: hf.Tensors) -> None:
    """A stored lm_head under tie_word_embeddings must be the embedding; otherwise one of them would go unseen."""
    if EMBEDDING in tensors and not hf.same_matrix(tensors, LM_HEAD, tensors, EMBEDDING):
        raise DataError(
            f"{tensors.folder}: config.json has tie_word_embeddings true, but {LM_HEAD} differs from {EMBEDDING}.\n"
            "Fetch the folder as its authors published it; which of the two the model was trained with is not in it."
        )
