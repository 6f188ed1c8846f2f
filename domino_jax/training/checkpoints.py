"""Training checkpoints: save in the background, keep what retention says, restore the newest intact one, and refuse a
recipe that changed in between.

<workdir>/checkpoints/<step>/state           the arrays (Orbax)
<workdir>/checkpoints/<step>/extra           JSON: the position in the data, and the recipe
<workdir>/checkpoints/<step>/manifest.json   written last (manifest.py); step_folders.py lists the other files
"""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from domino_jax.runtime.agreement import barrier, from_primary, primary_first
from domino_jax.runtime.differences import differences, flatten, refuse
from domino_jax.runtime.distributed import is_primary
from domino_jax.runtime.errors import DataError, DominoError, first_line, is_full
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.remote import open_path
from domino_jax.training.step_folders import Mark, StepFolders

# What Orbax and tensorstore raise for files that are missing, cut or of another shape: they have no class in common.
UNREADABLE = (ValueError, KeyError, OSError, TypeError)


class Restored(NamedTuple):
    """A checkpoint as read: the step it was taken after, the arrays, and the JSON beside them."""

    step: int
    state: Any
    data_state: dict
    meta: dict


class Checkpoints:
    """The checkpoints of one workdir. Saving returns at once; the end of `with` waits for it.

    With several processes the workdir is one that all of them see, and what saves, restores or waits is collective.
    Making one changes no file, so a run's checkpoints can be looked at (`folders`) while it trains.
    """

    def __init__(self, workdir: str | os.PathLike, keep: int = 3, report: Callable[[str], None] = print):
        """
        Args:
          workdir: local folder or gs:// address.
          keep: number of newest steps that stay, besides the best by τ.
          report: takes the warnings, a line each, of process 0.
        """
        self.folders = StepFolders(_absolute(workdir) / "checkpoints", report)
        self._keep, self._report = keep, report
        self._saving: tuple[int, Future] | None = None  # the step on its way, done with its manifest and the removals
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._orbax: ocp.AsyncCheckpointer | None = None
        self._best = self.folders.best()

    # ---------------------------------------------------------------- saving

    def save(self, step: int, state: Any, data_state: Mapping, meta: Mapping) -> None:
        """Write `state` (a pytree of arrays) as it is now; after this returns it may be donated.

        Waits for the save before this one. A DataError where the disk is full.

        Args:
          step: steps done; a step that is saved already is left alone.
          data_state: JSON: the data's position after that step's batch.
          meta: JSON values to compare at the next start, the resolved recipe above all.
        """
        if self._saving is not None and self._saving[0] == step:
            return
        self._settle()
        if self.folders.path(step).exists():
            return
        orbax = self._checkpointer()
        with self._writing(step):
            extra = {"data": dict(data_state), "meta": dict(meta)}
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra))
            orbax.save(self.folders.path(step), args=items)
        self._saving = step, self._pool.submit(self._finish, step, orbax)

    def _finish(self, step: int, orbax: ocp.AsyncCheckpointer) -> None:
        """In the background: once Orbax has written the step, hash it, and remove the steps that retention drops."""
        orbax.wait_until_finished()
        if is_primary():
            self.folders.finish(step)
            self.folders.retain(self._keep)

    def wait(self) -> None:
        """Return when the save on its way is over and has its manifest; a DataError when it failed."""
        primary_first(self._settle)  # only process 0 writes manifests, and the hashing may take long
        barrier("checkpoints finished")

    def _settle(self) -> None:
        """Wait for the save on its way; a DataError where the disk was full, else its error."""
        if self._saving is not None:
            (step, done), self._saving = self._saving, None
            with self._writing(step):
                done.result()

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """A full disk becomes a DataError, and what was written of the step is removed."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:  # tensorstore quotes the system's error in one of these
            if not is_full(error):
                raise
            self._orbax = None  # it still holds the failed save
            if is_primary():
                self.folders.remove(step)
            raise DataError(
                f"the checkpoint of step {step} could not be written ({first_line(error)}).\n"
                f"Make room for {self.folders.root} and start again: the run continues from the newest intact one."
            ) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None and jax.process_count() > 1:
            return  # a save on its way may wait for the process that was lost; the next save clears it away
        try:
            self.wait() if kind is None else self._settle()
        except DataError as failure:
            if kind is None:
                raise
            self._report(f"warning: {failure}")  # another error ends the run already
        self._pool.shutdown()
        if self._orbax is not None:
            self._orbax.close()

    # ---------------------------------------------------------------- restoring

    def restore_latest(self, abstract_state: Any, check: Callable[[dict], None] | None = None) -> Restored | None:
        """The newest intact checkpoint, None when there is none; damaged newer ones are set aside with a warning each.

        Args:
          abstract_state: the state's tree with jax.ShapeDtypeStruct leaves (jax.eval_shape) whose shardings need not be
            those it was saved with; a leaf without a sharding goes to the first device.
          check: called with the checkpoint's meta before an array is read; raises if the run must not go on from it.
        Raises:
          DataError: a checkpoint was finished before and none is intact, or one cannot be read though it is intact. A
            run's remains are never taken for a fresh start.
        """
        self.wait()
        step, best = from_primary(lambda: (self.folders.choose(), self.folders.best()))
        self._best = best and Mark(*best)
        if step is None:
            return None
        extra = self._read(step, "extra", ocp.args.JsonRestore())
        if check is not None:
            check(extra["meta"])
        state = self._read(step, "state", ocp.args.StandardRestore(jax.tree.map(_placed, abstract_state)))
        return Restored(step, state, extra["data"], extra["meta"])

    def _read(self, step: int, item: str, args: Any) -> Any:
        folder = self.folders.path(step)
        try:
            return self._checkpointer().restore(folder, args=ocp.args.Composite(**{item: args}))[item]
        except UNREADABLE as error:
            if jax.process_count() > 1:  # it may be a lost process
                raise
            raise DataError(
                f"the checkpoint {folder} is intact but cannot be read here ({item}: {first_line(error)}).\n"
                "It was saved for another model, or by another version; train in another --workdir."
            ) from error

    # ---------------------------------------------------------------- the best

    def mark_tau(self, step: int, tau: float, measured_with: str) -> None:
        """Note the τ of a step, saved or still to be: the finished step with the highest one is never removed.

        Every process has to note the same. τ with another measured_with no longer competes.
        """
        mark = Mark(step, float(tau), measured_with)
        if self._best is None or measured_with != self._best.measured_with or mark.tau >= self._best.tau:
            self._best = mark
        if is_primary():
            self.folders.mark(mark)

    def best(self) -> tuple[int, float] | None:
        """(step, τ) with the highest τ noted so far, of those measured like the newest; ties go to the later step.

        A save on its way counts. From restore_latest() on it is the same in every process.
        """
        return self._best and self._best[:2]

    def _checkpointer(self) -> ocp.AsyncCheckpointer:
        """Orbax's, made when needed. Not its CheckpointManager: that one asks JAX's preemption service about its own
        step numbers, from two threads, and removes old steps before the new one has its manifest."""
        if self._orbax is None:
            # Not in the background: a folder that cannot be made should be an error here, not a time-out there.
            options = ocp.AsyncOptions(create_directories_asynchronously=False)
            self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options)
        return self._orbax


def _absolute(workdir: str | os.PathLike) -> epath.Path:
    """Orbax asks for absolute paths; an address with a scheme (gs://) is one."""
    path = open_path(workdir)
    return path if is_remote(workdir) else path.expanduser().resolve()


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def refuse_other_target(saved: dict, identity: dict, allowed: tuple[str, ...]) -> None:
    """Refuse to go on from, or to show, what was trained for another target; saved: has its identity as "target"."""
    if not any(entry.split(".")[0] == "target" for entry in allowed):
        before = {key: value for key, value in saved.items() if key == "target"}
        refuse(
            differences(before, {"target": identity}),
            "this workdir was trained for another target than the one in config.target.path:",
            "Bring its folder back, train in another workdir, or allow it with --allow_config_change=target.path",
        )


def refuse_unknown(allowed: Collection[str], names: Collection[str]) -> None:
    """A DominoError for an entry of --allow_config_change that covers none of the recipe's keys `names`."""
    for entry in allowed:
        if not any(_covers(entry, name) for name in names):
            raise DominoError(f"--allow_config_change={entry}: the recipe has no such key or section.")


def refuse_changes(
    old: Mapping, new: Mapping, free: Collection[str], allowed: Collection[str], fixed: Collection[str] = ()
) -> None:
    """Refuse to continue a run whose recipe changed, field by field.

    Args:
      old, new: resolved recipes, the checkpoint's and this run's.
      free: keys or sections that may always change.  allowed: keys that --allow_config_change names.
      fixed: keys that may not change even so.
    """
    refuse_unknown(allowed, flatten(old).keys() | flatten(new).keys())
    changes = differences(old, new)
    impossible = {key: changes[key] for key in changes if any(_covers(entry, key) for entry in fixed)}
    refuse(
        impossible,
        "the checkpoint in this workdir was made with another drafter, optimizer or layout of the data:",
        "Set it back, or train in another workdir; --allow_config_change cannot allow it.",
    )
    changed = {key: changes[key] for key in changes if not any(_covers(entry, key) for entry in (*free, *allowed))}
    refuse(
        changed,
        "the recipe differs from the recipe of the checkpoint in this workdir:",
        f"Set it back, train in another workdir, or allow it with --allow_config_change={','.join(changed)}",
    )


def _covers(entry: str, key: str) -> bool:
    return key == entry or key.startswith(f"{entry}.")
