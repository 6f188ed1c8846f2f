"""<workdir>/finished.json: a run has taken all its steps, and what it leaves behind is whole.

    {"step": 900, "processes": 1, "export_sha256": "…"}

Written last, after the last export and the final decoding; nothing else says that a run is finished. The hash is over
the files that hold the drafter, so the model card may be edited and `tune` may add its constants.
"""

import hashlib
import json
from collections.abc import Callable

from etils import epath

from domino_jax import manifest

NAME = "finished.json"


def mark_finished(workdir: epath.Path, step: int, processes: int) -> None:
    """Write the marker for the export as it is now; by process 0 alone."""
    marker = {"step": step, "processes": processes, "export_sha256": export_hash(workdir / "export")}
    manifest.write_whole(workdir / NAME, json.dumps(marker).encode())


def read_marker(workdir: epath.Path, steps: int, report: Callable[[str], None]) -> dict | None:
    """The marker of a run that took at least `steps` steps and whose export is intact; else None.

    Args:
      report: takes a line for a marker that does not fit. The run then continues from its checkpoint, which exports
        again.
    """
    try:
        marker = json.loads((workdir / NAME).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        report(f"warning: {workdir / NAME} is unreadable ({error}); the run counts as unfinished")
        return None
    if not isinstance(marker, dict) or not {"step", "processes", "export_sha256"} <= marker.keys():
        report(f"warning: {workdir / NAME} names no step or no export; the run counts as unfinished")
        return None
    if marker["step"] < steps:
        report(f"the run in {workdir} ended at step {marker['step']}; train.steps is {steps}")
        return None
    if marker["export_sha256"] != export_hash(workdir / "export"):
        report(f"warning: {workdir / 'export'} changed since the run ended: it is exported again from its checkpoint")
        return None
    return marker


def export_hash(folder: epath.Path) -> str | None:
    """SHA-256 over names, sizes and contents of an export's config.json and weights; None without a config.json."""
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if "config.json" not in names:
        return None
    digest = hashlib.sha256()
    for name in names:
        if name == "config.json" or name.endswith((".safetensors", ".safetensors.index.json")):
            size, content = manifest.measure(folder / name)
            digest.update(f"{name} {size} {content}\n".encode())
    return digest.hexdigest()
