"""Training checkpoints: save in the background, keep the newest, restore, and refuse a recipe that changed in between.

<workdir>/checkpoints/<step>/state   the arrays (Orbax)
<workdir>/checkpoints/<step>/extra   JSON: where the data stands, and the recipe
"""

import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from domino_jax.errors import DataError, DominoError

# What Orbax and tensorstore raise for files that are missing, cut or of another shape: there is no class of their own.
UNREADABLE = (ValueError, KeyError, OSError, TypeError)

MAX_DIFFERENCES = 4  # a message stays within five lines


class Restored(NamedTuple):
    """A checkpoint as read: the step it was taken after, the arrays, and the JSON beside them."""

    step: int
    state: Any
    iterator_state: dict
    meta: dict


class Checkpoints:
    """The checkpoints of one workdir. Saving returns at once; wait() or close() before the process ends."""

    def __init__(self, workdir: str | os.PathLike, keep: int):
        self.folder = pathlib.Path(workdir).expanduser().resolve() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=("state", "extra"))

    def save(self, step: int, state: Any, iterator_state: Mapping, meta: Mapping) -> None:
        """Write `state` (a pytree of arrays) as it is now: it is copied before this returns and may be donated then.

        Args:
          step: steps done; a step that is saved already is left alone.
          iterator_state: what the data iterator's get_state() gave behind that step's batch.
          meta: JSON values to compare at the next start, the resolved recipe above all.
        """
        if step in self._manager.all_steps():
            return
        extra = {"iterator": dict(iterator_state), "meta": dict(meta)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
        self._manager.save(step, args=items)

    def steps(self) -> list[int]:
        """The finished checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def restore_latest(self, abstract_state: Any, check: Callable[[dict], None] | None = None) -> Restored | None:
        """The newest checkpoint, None when there is none; one that cannot be read is a DataError, never a fresh start.

        Args:
          abstract_state: the state's tree with jax.ShapeDtypeStruct leaves (jax.eval_shape); a leaf without a sharding
            goes to the first device.
          check: called with the checkpoint's meta before an array is read; raises when the run must not continue from
            it.
        """
        self.wait()
        steps = self.steps()
        return self._restore(steps[-1], abstract_state, check) if steps else None

    def _restore(self, step: int, abstract_state: Any, check: Callable[[dict], None] | None) -> Restored:
        extra = self._read(step, "extra", ocp.args.JsonRestore())
        if not isinstance(extra, dict) or not {"iterator", "meta"} <= extra.keys():
            raise self._unreadable(step, "its JSON lacks the data position or the recipe")
        if check is not None:
            check(extra["meta"])
        state = self._read(step, "state", ocp.args.StandardRestore(jax.tree.map(_placed, abstract_state)))
        return Restored(step, state, extra["iterator"], extra["meta"])

    def _read(self, step: int, item: str, args: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except UNREADABLE as error:
            raise self._unreadable(step, f"{item}: {_first_line(error)}") from error

    def _unreadable(self, step: int, reason: str) -> DataError:
        return DataError(
            f"the checkpoint {self.folder / str(step)} cannot be read ({reason}).\n"
            "Move that folder away to continue from an older one, or train in another workdir."
        )

    def wait(self) -> None:
        """Return when every checkpoint is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and let go of the background threads."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


def config_diff(old: Mapping, new: Mapping) -> dict[str, tuple[Any, Any]]:
    """Dotted key → (old, new) wherever two resolved recipes differ; a key that one of them lacks is None there."""
    before, now = _flatten(old), _flatten(new)
    pairs = {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys())}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flatten(tree: Mapping, above: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat


def refuse_changes(old: Mapping, new: Mapping, free: Collection[str], allowed: Collection[str]) -> None:
    """Refuse to continue a run whose recipe changed, field by field.

    Args:
      old, new: resolved recipes, the checkpoint's and this run's.
      free: keys or sections that may always change; allowed: those that --allow_config_change names.
    """
    names = _flatten(old).keys() | _flatten(new).keys()
    for entry in allowed:
        if not any(_covers(entry, name) for name in names):
            raise DominoError(f"--allow_config_change={entry}: the recipe has no such key or section.")
    open_keys = (*free, *allowed)
    changed = {
        key: pair for key, pair in config_diff(old, new).items() if not any(_covers(entry, key) for entry in open_keys)
    }
    if not changed:
        return
    lines = [f"  {key}: {was!r} in the checkpoint, {now!r} now" for key, (was, now) in changed.items()]
    if len(lines) > MAX_DIFFERENCES - 1:
        lines = [*lines[: MAX_DIFFERENCES - 2], f"  and {len(lines) - MAX_DIFFERENCES + 2} more"]
    raise DominoError(
        "\n".join(
            [
                "the recipe differs from that of the checkpoint in this workdir:",
                *lines,
                f"Set it back, train in another workdir, or allow it with --allow_config_change={','.join(changed)}",
            ]
        )
    )


def _covers(entry: str, key: str) -> bool:
    return key == entry or key.startswith(f"{entry}.")
