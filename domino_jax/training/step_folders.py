"""The files of a workdir's checkpoints: which are finished, which are intact, which stay. Knows no arrays.

<workdir>/checkpoints/
  <step>/             one checkpoint; finished once it has its manifest (manifest.py), which is written last
  unfinished-<step>   empty: <step> is being written or removed, what is in it does not count
  tau.json            {step: {"tau": of its evaluation, "measured_with": what it was measured with}}
  corrupt/<step>      checkpoints that did not match their manifest, set aside at a start
<workdir>/first_checkpoint.json   {"step": the first one that was finished}: a start without any checkpoint has lost it

The marker distinguishes a save that was cut off, which the next start removes, from a checkpoint that lost its
manifest, which it sets aside. No step is renamed on the way, so buckets (gs://), where renaming copies, work alike.
"""

from collections.abc import Callable
from typing import NamedTuple

import orbax.checkpoint as ocp
from etils import epath

from domino_jax.runtime.errors import DataError, first_line
from domino_jax.runtime.json_files import parse_json, write_json
from domino_jax.runtime.remote import move_folder
from domino_jax.training import manifest

UNFINISHED = "unfinished-"
CORRUPT = "corrupt"
FIRST = "first_checkpoint.json"
# What a workdir holds only after a checkpoint was finished: the best one is exported after its checkpoint.
EVIDENCE = (FIRST, "export/config.json", "finished.json")
TAU, WITH = "tau.json", "measured_with"
TEMPORARY = ocp.utils.TMP_DIR_SUFFIX  # Orbax writes to <step><this>… and renames it to <step>


class Mark(NamedTuple):
    """The τ of a step; only those with the same measured_with can be compared."""

    step: int
    tau: float
    measured_with: str


class StepFolders:
    """The steps under one folder. Of several processes only process 0 calls what changes files."""

    def __init__(self, folder: epath.Path, report: Callable[[str], None]):
        self.root, self._report = folder, report

    def path(self, step: int) -> epath.Path:
        return self.root / str(step)

    def finished(self) -> list[int]:
        """The steps with a manifest, oldest first; whether they still match it is damage()'s to say."""
        return [step for step in self._steps() if (self.path(step) / manifest.NAME).exists()]

    def damage(self, step: int) -> str | None:
        """What is wrong with a step's files, "<file>: <reason>"; None when they are as they were written."""
        return manifest.damage(self.path(step), step)

    # ---------------------------------------------------------------- writing

    def begin(self, step: int) -> None:
        """Before anything of a step is written."""
        self.root.mkdir(parents=True, exist_ok=True)
        self._marker(step).write_bytes(b"")

    def finish(self, step: int) -> None:
        """After the last file of a step: hash them all. From here on it counts."""
        manifest.write(self.path(step), step)
        self._marker(step).unlink()
        first = self.root.parent / FIRST
        try:
            if not first.exists():
                write_json(first, {"step": step})
        except OSError as error:  # a disk that had just enough room for the checkpoint
            self._report(f"warning: {first} could not be written ({first_line(error)})")

    def remove(self, step: int) -> None:
        """Remove a step, finished or not, so that being cut off here leaves nothing that looks finished."""
        try:
            try:
                self._marker(step).write_bytes(b"")
            except OSError:  # a full disk, where a step without a manifest is the one to remove
                if (self.path(step) / manifest.NAME).exists():
                    raise
            (self.path(step) / manifest.NAME).unlink(missing_ok=True)
            self.path(step).rmtree(missing_ok=True)
            self._clear_marks(step)
        except OSError as error:
            self._report(f"warning: {self.path(step)} could not be removed ({first_line(error)})")

    def retain(self, keep: int) -> None:
        """Remove what is neither among the newest `keep` nor the best; called after finish()."""
        steps, best = self.finished(), self.best()
        stay = set(steps[-keep:]) | {best.step if best else None}
        for step in steps:
            if step not in stay:
                self.remove(step)

    def _clear_marks(self, step: int) -> None:
        for name in self._names():
            if name.startswith(f"{step}{TEMPORARY}"):
                (self.root / name).rmtree()
        self._marker(step).unlink(missing_ok=True)

    # ---------------------------------------------------------------- a start

    def choose(self) -> int | None:
        """The newest intact step, None without any. Clears away what was cut off and sets damaged newer steps aside.

        Raises DataError: there are steps and none is intact, or there were steps and all are gone.
        """
        self._clear_cut_off()
        damaged = {}
        for step in reversed(self._steps()):
            reason = self.damage(step)
            if reason is None:
                for wrong, why in damaged.items():
                    self._set_aside(wrong, why)
                return step
            damaged[step] = reason
        if not damaged:
            self.refuse_loss()
            return None
        # They stay where they are: with an empty folder the next start would take this for a new run.
        newest = max(damaged)
        raise DataError(
            f"none of the checkpoints in {self.root} is intact ({len(damaged)} damaged).\n"
            f"The newest, step {newest}: {damaged[newest]}\n"
            "Put one back from a copy and start again, or train from the start in another --workdir."
        )

    def refuse_loss(self) -> None:
        """Raises DataError: there is no step, but something beside shows that there was one."""
        if self._steps():
            return
        evidence = [name for name in EVIDENCE if (self.root.parent / name).exists()]
        if evidence:
            usable = " The drafter in export/ can be used as it is." if (self.root.parent / "export").exists() else ""
            raise DataError(
                f"{self.root} holds no checkpoint, but {evidence[0]} beside it shows that one was saved.\n"
                f"Put the checkpoints back and start again, or train from the start in another --workdir.{usable}"
            )

    def _clear_cut_off(self) -> None:
        names = self._names()
        marked = [int(name.removeprefix(UNFINISHED)) for name in names if name.startswith(UNFINISHED)]
        temporary = [int(name.split(TEMPORARY)[0]) for name in names if TEMPORARY in name]
        for step in sorted({*marked, *temporary}):
            if (self.path(step) / manifest.NAME).exists():  # cut off between the manifest and the marker's end
                self._clear_marks(step)
            else:
                self.remove(step)
                self._report(f"the checkpoint of step {step} was cut off while it was written or removed: cleared away")

    def _set_aside(self, step: int, reason: str) -> None:
        target, number = self.root / CORRUPT / str(step), 1
        while target.exists():
            number += 1
            target = target.with_name(f"{step}-{number}")
        try:
            move_folder(self.path(step), target)
        except OSError as error:
            raise DataError(
                f"the checkpoint of step {step} is damaged ({reason}) and cannot be moved to {target}:\n"
                f"{first_line(error)}. Move it away by hand."
            ) from error
        self._report(f"warning: the checkpoint of step {step} is damaged ({reason}); moved to {target}")

    # ---------------------------------------------------------------- the best

    def mark(self, mark: Mark) -> None:
        """Note the τ of a step that is finished or will be."""
        marks = [*self._marks(), mark]
        self.root.mkdir(parents=True, exist_ok=True)
        write_json(self.root / TAU, {step: {"tau": tau, WITH: measured_with} for step, tau, measured_with in marks})

    def best(self) -> Mark | None:
        """The finished step with the highest τ, of equal ones the later; among those measured like the newest."""
        steps = set(self.finished())
        marks = sorted(mark for mark in self._marks() if mark.step in steps)
        alike = [mark for mark in marks if mark.measured_with == marks[-1].measured_with]
        return max(alike, key=lambda mark: (mark.tau, mark.step), default=None)

    def _marks(self) -> list[Mark]:
        try:
            stored = parse_json((self.root / TAU).read_bytes())
            return [Mark(int(step), float(entry["tau"]), str(entry[WITH])) for step, entry in stored.items()]
        except FileNotFoundError:
            return []
        except (ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:
            self._report(f"warning: {self.root / TAU} is unreadable ({first_line(error)}): the best step is unknown")
            return []

    # ---------------------------------------------------------------- names

    def _steps(self) -> list[int]:
        return sorted(int(name) for name in self._names() if name.isdecimal())

    def _names(self) -> list[str]:
        return [path.name for path in self.root.iterdir()] if self.root.exists() else []

    def _marker(self, step: int) -> epath.Path:
        return self.root / f"{UNFINISHED}{step}"
