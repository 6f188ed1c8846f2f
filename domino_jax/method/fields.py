"""The fields of a drafter's config. A field is declared once, with its range and its names in files and recipes:

    emb_dim: int = field(least=1, most=LARGEST_RANK, recipe=256)

How config.json is read and written, the check of the range and the key of the recipe follow.
"""

import dataclasses
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, get_args, get_origin

from domino_jax.method.config_keys import (
    choice,
    integer,
    missing_keys,
    number,
    read_key,
    read_list,
    read_switch,
    refuse,
)
from domino_jax.runtime.keys import Key

# Far above any public drafter: more slots or a larger rank are refused before anything is allocated.
LARGEST_BLOCK, LARGEST_RANK = 4_096, 65_536
TOP, NESTED, BY_HEAD = "top level", "dflash_config", ""  # the places of a key in config.json


@dataclasses.dataclass(frozen=True)
class Field:
    """One declared field. Its first attributes are arguments of `field`.

    place: where it is written, TOP, NESTED or by `head_keys` (BY_HEAD). It is read in either place, or in both.
    quiet: it is not written where it has the default.
    also: its names in other files.  like: the field that gives its value where a file does not have it.
    recipe_name: of its key in the recipe, if another one.
    key: the default in a recipe, None without a key there, and its range.
    default: what a file without the key means; MISSING: a file must have it.
    """

    place: str = NESTED
    quiet: bool = False
    also: tuple[str, ...] = ()
    like: str = ""
    recipe_name: str = ""
    key: Key = Key(None)
    name: str = ""
    type: Any = None
    default: Any = None


def field(default: Any = dataclasses.MISSING, *, recipe: Any = None, **choices: Any) -> Any:
    """A field of a config's class that is a key of its config.json.

    Args:
        default: what a file without the key means; without a default a file must have it.
        recipe: the default of the recipe's key; None: the recipe has none.
        choices: attributes of Field, and limits of the value as in Key. A text needs Key's `choices`.
    """
    limits = {name: choices.pop(name) for name in tuple(choices) if not hasattr(Field, name)}
    return dataclasses.field(
        default=default, kw_only=True, metadata={"field": Field(**choices, key=Key(recipe, **limits))}
    )


def fields_of(config: Any, base: type | None = None) -> Iterator[Field]:
    """The declared fields of a config or its class, without the fields of `base`."""
    inherited = {entry.name for entry in dataclasses.fields(base)} if base else ()
    for entry in dataclasses.fields(config):
        if "field" in entry.metadata and entry.name not in inherited:
            yield dataclasses.replace(entry.metadata["field"], name=entry.name, type=entry.type, default=entry.default)


def keyed_fields(config: type) -> dict[str, tuple[str, Key]]:
    """{field: (the recipe's name of it, its key)}, of the fields that the recipe has keys for."""
    keyed = (entry for entry in fields_of(config) if entry.key.default is not None)
    return {entry.name: (entry.recipe_name or entry.name, entry.key) for entry in keyed}


# ---------------------------------------------------------------------------------------------------------------- files


def read_fields(
    config: type, raw: dict[str, Any], nested: dict[str, Any], needed: Collection[str], title: str
) -> dict[str, Any]:
    """The values of the declared fields in a config.json; nested: its dflash_config.

    needed: fields that a file must have although they have a default.  title: of the drafter in messages.

    Raises:
        DataError: a key that is missing, of a wrong type, or stated twice with different values.
    """
    values, missing = {}, []
    for entry in fields_of(config):
        value = _read(entry, raw, nested)
        required = entry.name in needed or (entry.default is dataclasses.MISSING and not entry.like)
        if value is None and required:
            missing.append(entry.name)
        if value is None:
            value = values[entry.like] if entry.like else entry.default
        values[entry.name] = value
    if missing:
        raise missing_keys(title, *missing)
    return values


def _read(entry: Field, raw: dict[str, Any], nested: dict[str, Any]) -> Any:
    """The value of a key of config.json, None when absent."""
    name, kind = entry.name, entry.type
    if isinstance(kind, types.UnionType):
        [kind] = [part for part in get_args(kind) if part is not types.NoneType]
    if kind is bool:
        return read_switch(raw, nested, name, *entry.also)
    value = read_key(raw, nested, name)
    if value is None or (kind is float and entry.default is None and value == 0):  # servers read a cap of 0 as none
        return None
    if get_origin(kind) is tuple:
        return tuple(integer(name, part) for part in read_list(name, value))
    if kind is str:
        return choice(name, value, entry.key.choices)
    return integer(name, value) if kind is int else number(name, value)


def written(config: Any, fields: Iterable[Field], place: str | None = None) -> dict[str, Any]:
    """{key of config.json: its value} of these fields; place: of the fields that are written there alone."""
    values = {}
    for entry in fields:
        value = getattr(config, entry.name)
        if place in (None, entry.place) and not (entry.quiet and value == entry.default):
            values[entry.name] = list(value) if isinstance(value, tuple) else value
    return values


def check_ranges(config: Any) -> None:
    """Raises DataError for the first field whose value is out of its range."""
    for entry in fields_of(config):
        value, key = getattr(config, entry.name), entry.key
        limits = f"in {key.least}..{key.most}" if key.most is not None else f"{key.least} or more"
        wrong = key.least is not None and key.problem(value) is not None
        refuse(wrong, entry.name, f"{entry.name} {value} must be {limits}")
