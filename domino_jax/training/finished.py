"""<workdir>/finished.json: a run has taken all its steps, and its files are complete.

    {"step": 900, "processes": 1, "exported_step": 800, "target": {…}}

exported_step is the one with the best τ, or the last; target is an identity (weights/identity.py). Written last, after
the last export and the final decoding; nothing else marks a run as finished.
"""

from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from domino_jax.runtime.errors import DataError
from domino_jax.runtime.json_files import read_json, write_json
from domino_jax.training.step_folders import StepFolders

NAME = "finished.json"
FIELDS = ("step", "processes", "exported_step")


def mark_finished(
    workdir: epath.Path, step: int, processes: int, exported_step: int, target: Mapping[str, Any]
) -> None:
    """Write the marker; by process 0 alone."""
    marker = dict(zip(FIELDS, (step, processes, exported_step), strict=True))
    write_json(workdir / NAME, {**marker, "target": dict(target)})


def read_marker(workdir: epath.Path, steps: int, report: Callable[[str], None]) -> dict[str, Any] | None:
    """The marker of a run that took at least `steps` steps and whose export is there; else None, with a reported line.

    The run then continues from its checkpoint, which exports again. Raises DataError: all its checkpoints are gone.
    """
    marker = parse_marker(workdir, report)
    if marker is None:
        return None
    if marker["step"] < steps:
        report(f"the run in {workdir} ended at step {marker['step']}; train.steps is {steps}")
        return None
    export = workdir / "export"
    if not ((export / "config.json").exists() and any(export.glob("*.safetensors"))):
        report(f"warning: {export} is gone or has no weights: it is exported again from its checkpoint")
        return None
    folders = StepFolders(workdir / "checkpoints", report)
    if not folders.finished():
        raise folders.loss({})
    return marker


def parse_marker(workdir: epath.Path, report: Callable[[str], None]) -> dict[str, Any] | None:
    """The marker as it was written, whatever happened to the export; None without one that can be read."""
    if not (workdir / NAME).exists():
        return None
    try:
        marker = read_json(workdir / NAME)
    except DataError:
        marker = {}
    if any(type(marker.get(name)) is not int for name in FIELDS):
        report(f"warning: {workdir / NAME} is damaged; the run counts as unfinished")
        return None
    return marker
