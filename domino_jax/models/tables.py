"""Rows of the tables that tell which tensor of a file is which leaf of the parameters (weights/target.py)."""

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of a table. `shape` is the stored one; with `transpose` the leaf has it the other way round."""

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    transpose: bool = False

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transpose else self.shape


def linear(name: str, path: tuple[str, ...], out_width: int, in_width: int) -> Entry:
    """A matrix stored [out, in] that becomes `path`/kernel [in, out]."""
    return Entry(f"{name}.weight", (*path, "kernel"), (out_width, in_width), transpose=True)


def biased(name: str, path: tuple[str, ...], out_width: int, in_width: int) -> list[Entry]:
    """A matrix and its bias."""
    return [linear(name, path, out_width, in_width), Entry(f"{name}.bias", (*path, "bias"), (out_width,))]


def norm(name: str, path: tuple[str, ...], width: int) -> Entry:
    return Entry(f"{name}.weight", (*path, "scale"), (width,))


def prefix_hint(names: Iterable[str], wanted: Collection[str], aliases: Mapping[str, str] | None = None) -> str:
    """A sentence if all wanted names are among `names` without a prefix that these share, as of a wrapper; else ""."""
    names, aliases = list(names), aliases or {}
    shared = os.path.commonprefix(names)
    for end in (place + 1 for place, letter in enumerate(shared) if letter == "."):
        bare = [name[end:] for name in names]
        if wanted and set(wanted) <= {aliases.get(name, name) for name in bare}:
            return f" Unknown names begin with {shared[:end]!r}; without it they fit: rename the tensors."
    return ""
