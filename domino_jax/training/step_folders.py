"""The files of a workdir's checkpoints: which are intact and which stay. Knows no arrays.

<workdir>/checkpoints/
  <step>/          one checkpoint; it counts if its manifest (manifest.py), which is written last, is there and intact
  tau.json         {step: {"tau": of its evaluation, "measured_with": what it was measured with}}
  corrupt/<step>   other steps, set aside at a start
<workdir>/first_checkpoint.json   {"step": the first one that was finished}: a start without an intact one has lost it

No step is renamed on the way, so buckets (gs://), where renaming copies, work alike.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import orbax.checkpoint as ocp
from etils import epath

from domino_jax.runtime.errors import DataError, first_line
from domino_jax.runtime.json_files import read_json, write_json
from domino_jax.runtime.remote import move_folder
from domino_jax.training import manifest
from domino_jax.weights import hf

CORRUPT, FIRST, TAU, WITH = "corrupt", "first_checkpoint.json", "tau.json", "measured_with"
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
        """The steps with a manifest, oldest first; `damage` states whether they still match it."""
        return [step for step in self._steps() if (self.path(step) / manifest.NAME).exists()]

    def damage(self, step: int) -> str | None:
        """The first problem of a step's files, "<file>: <reason>"; None when they are as they were written."""
        return manifest.damage(self.path(step), step)

    # ---------------------------------------------------------------- writing

    def finish(self, step: int) -> None:
        """After the last file of a step: hash them all. From here on it counts."""
        manifest.write(self.path(step), step)
        with contextlib.suppress(OSError):  # a disk that had just enough room for the checkpoint
            if not (self.root.parent / FIRST).exists():
                write_json(self.root.parent / FIRST, {"step": step})

    def remove(self, step: int) -> None:
        """Remove a step, finished or not, its manifest first: a removal that is cut off leaves nothing that counts."""
        try:
            (self.path(step) / manifest.NAME).unlink(missing_ok=True)
            for name in [name for name, of in self._names().items() if of == step]:
                (self.root / name).rmtree()
        except OSError as error:
            self._report(f"warning: {self.path(step)} could not be removed ({first_line(error)})")

    def retain(self, keep: int) -> None:
        """After finish(): remove all but the newest `keep` and the best, also what a kill left of other steps."""
        best = self.best()
        stay = {*self.finished()[-keep:], *([best.step] if best else [])}
        for step in {*self._names().values()} - stay:
            self.remove(step)

    # ---------------------------------------------------------------- a start

    def choose(self) -> int | None:
        """The newest intact step, None without any. Newer ones are set aside.

        Raises DataError: no step is intact, and one was finished before.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self._steps()):
            reason = self.damage(step)
            if reason is None:
                break
            damaged[step] = reason
        else:
            if self.finished() or (self.root.parent / FIRST).exists():
                raise self.loss(damaged)  # nothing is moved: the next start must not take this for a new run
            step = None
        for wrong, reason in damaged.items():
            self._set_aside(wrong, reason)
        return step

    def loss(self, damaged: dict[int, str]) -> DataError:
        """The error that no step is intact. damaged: {step: what is wrong with it}."""
        lines = [f"{self.root} holds no intact checkpoint."]
        if damaged:
            lines += [f"The newest of {len(damaged)}, step {max(damaged)}: {damaged[max(damaged)]}"]
        lines += ["Put one back from a copy, or train from the start in another --workdir."]
        return DataError("\n".join(lines))

    def _set_aside(self, step: int, reason: str) -> None:
        target = self.root / CORRUPT / str(step)
        if target.exists():  # an earlier one of this step
            target.rmtree()
        move_folder(self.path(step), target)
        self._report(f"warning: the checkpoint of step {step} is damaged ({reason}); moved to {target}")

    # ---------------------------------------------------------------- the best

    def mark(self, mark: Mark) -> None:
        """Note the τ of a step that is finished or will be."""
        self.root.mkdir(parents=True, exist_ok=True)
        marks = {step: {"tau": tau, WITH: measured_with} for step, tau, measured_with in [*self._marks(), mark]}
        write_json(self.root / TAU, marks)

    def best(self) -> Mark | None:
        """The finished step with the highest τ, of equal ones the later; among those measured like the newest."""
        steps = set(self.finished())
        marks = sorted(mark for mark in self._marks() if mark.step in steps)
        alike = [mark for mark in marks if mark.measured_with == marks[-1].measured_with]
        return max(alike, key=lambda mark: (mark.tau, mark.step), default=None)

    def _marks(self) -> list[Mark]:
        stored = read_json(self.root / TAU) if (self.root / TAU).exists() else {}
        with hf.naming(self.root, TAU):
            return [Mark(int(step), float(entry["tau"]), entry[WITH]) for step, entry in stored.items()]

    # ---------------------------------------------------------------- names

    def _steps(self) -> list[int]:
        return sorted(step for name, step in self._names().items() if TEMPORARY not in name)

    def _names(self) -> dict[str, int]:
        """The step of each folder, by its name."""
        names = [path.name for path in self.root.iterdir()] if self.root.exists() else []
        steps = {name: name.partition(TEMPORARY)[0] for name in names}
        return {name: int(step) for name, step in steps.items() if step.isdecimal()}
