"""Rows of the tables that tell which tensor of a file is which leaf of the parameters (weights/target.py)."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax

from domino_jax.models.sharding import EXPERTS

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of a table. The tensor has `shape`; with `transpose` the leaf has it the other way round.

    dtype: of the leaf; "": the one in which the model computes.
    stored: the only type of a tensor that is read, by its name in safetensors; "": any floating one.
    experts: above 0 the leaf is made of this many tensors of `shape`, along its first axis; in `name` the number of the
        expert is "*".
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    transpose: bool = False
    dtype: str = ""
    stored: str = ""
    experts: int = 0

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        shape = self.shape[::-1] if self.transpose else self.shape
        return (self.experts, *shape) if self.experts else shape

    @property
    def names(self) -> list[str]:
        """The names of its tensors."""
        return [self.name.replace("*", str(index)) for index in range(self.experts)] or [self.name]


def table_of(shapes: Any, prefixes: Mapping[str, str]) -> list[Entry]:
    """The table of a module from the shapes of its parameters, a tree of dicts.

    Files hold matrices output-first and parameters input-first, but for tables of rows.

    Args:
        prefixes: {how a parameter's path begins, as layers.0.mlp.up_proj.weight: how its tensor's name does}.
    """
    table = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        path = tuple(key.key for key in keys)
        last = "weight" if path[-1] in ("kernel", "scale", "embedding") else path[-1]
        name = ".".join(re.sub(r"_(\d+)$", r".\1", part) for part in (*path[:-1], last))
        experts = leaf.shape[0] if EXPERTS in path else 0
        shape, name = leaf.shape[bool(experts) :], name.replace(f".{EXPERTS}.", f".{EXPERTS}.*.")
        transpose = len(shape) == 2 and path[-1] != "embedding"
        stored_shape = shape[::-1] if transpose else shape
        table.append(Entry(rename(name, prefixes), path, stored_shape, transpose, experts=experts))
    return table


def rename(name: str, prefixes: Mapping[str, str]) -> str:
    """The name with the first of these prefixes that it has replaced; the name itself where it has none of them."""
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)
