"""Keys of a recipe: the default, the range and the meaning of each are declared on one line.

    section(
        steps=Key(1_000, least=1),  # optimizer steps
        path=Key(str),  # absent unless it is set
        remat=False,  # a key without a range
    )

A recipe consists of such sections, and its values are read by attribute. The keys of a head are declared in its file
(heads/), the keys of decoding in its settings classes (settings.py), all others in configs/qwen3.py.
"""

import dataclasses
import numbers
from collections.abc import Iterator
from typing import Any

from ml_collections import config_dict

LARGEST = 2**31 - 1  # the largest int32


@dataclasses.dataclass(frozen=True)
class Key:
    """One key: its default, or the type of a value that may be absent, and the values that are allowed.

    least, most: limits that are allowed themselves.  above, below: limits that are not.
    of: the type of the entries of a tuple; limits and choices then hold for each entry.
    shape: whether it decides the shapes of the arrays of a checkpoint.
    """

    default: Any
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    of: type | None = None
    shape: bool = False

    def change(self, **fields: Any) -> "Key":
        """The same key with other fields."""
        return dataclasses.replace(self, **fields)

    def problem(self, value: Any) -> str | None:
        """What to change about a value that is not allowed; None for one that is, or that is absent."""
        entries = value if self.of else [value]
        if value is None or all(map(self._allows, entries)):
            return None
        if self.kind in (int, float) and not all(map(self._fits, entries)):
            return f"give {'an integer' if self.kind is int else 'a number'}"
        if any(isinstance(entry, int) and abs(entry) > LARGEST for entry in entries):
            return f"integers must fit int32; give {LARGEST} or less"
        return f"{'list values, each ' if self.of else 'give '}{self.allowed}"

    @property
    def allowed(self) -> str:
        """The range in words."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        words = {"least": "{} or more", "above": "a number above {}", "most": "at most {}", "below": "below {}"}
        limits = [text.format(getattr(self, name)) for name, text in words.items() if getattr(self, name) is not None]
        return " and ".join(limits) or {int: "an integer", str: "a text"}.get(self.kind, "a number")

    @property
    def kind(self) -> type:
        """The type of a value, or of the entries of a tuple."""
        return self.of or (self.default if isinstance(self.default, type) else type(self.default))

    def _fits(self, value: Any) -> bool:
        """Whether the kind of a number, or of a tuple's entry, is right."""
        kinds = {int: numbers.Integral, float: numbers.Real}  # numpy's too
        truth = self.kind in kinds and isinstance(value, bool)
        return isinstance(value, kinds.get(self.kind, self.of or object)) and not truth

    def _allows(self, value: Any) -> bool:  # NaN is in no range
        return self._fits(value) and (
            (not self.choices or value in self.choices)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (not isinstance(value, int) or abs(value) <= LARGEST)
            and (value != "" or self.default in ("", str))  # "" takes back what a recipe sets
        )


class Section(config_dict.ConfigDict):
    """A part of a recipe, which knows the Key of each value."""

    declared: dict[str, Key] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if self.is_locked and name not in self:
            raise KeyError(f'"{name}" is no key of this section, which has {", ".join(sorted(self))}')
        super().__setitem__(name, value)


def section(**values: Any) -> Section:
    """A section of these keys: Keys, other sections, or plain defaults of keys that have no range."""
    result, declared = Section(), {}
    for name, value in values.items():
        if isinstance(value, Section):
            result[name] = value
        else:
            key = declared[name] = value if isinstance(value, Key) else Key(value)
            result[name] = config_dict.placeholder(key.default) if isinstance(key.default, type) else key.default
    object.__setattr__(result, "declared", declared)
    return result


def walk(config: Section, above: str = "") -> Iterator[tuple[str, Key, Any]]:
    """(dotted name, Key, value) of each value of a recipe."""
    for name, value in config.items():
        if isinstance(value, config_dict.ConfigDict):
            yield from walk(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", config.declared[name], value


# ------------------------------------------------------------------------------------------------- settings classes


def key(default: Any, *, recipe: Any = None, **limits: Any) -> Any:
    """A field of a settings class that is a key of the recipe as well.

    recipe: the default in a recipe, where it is another one.  limits: fields of Key.
    """
    declared = Key(default if recipe is None else recipe, **limits)
    return dataclasses.field(default=default, metadata={"key": declared})


def keys_of(settings: type) -> dict[str, Key]:
    """The keys that a settings class declares."""
    return {entry.name: entry.metadata["key"] for entry in dataclasses.fields(settings) if entry.metadata}
