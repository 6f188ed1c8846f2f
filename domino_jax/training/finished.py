"""<workdir>/finished.json: a run has taken all its steps, and its files are complete.

    {"step": 900, "processes": 1, "exported_step": 800, "export_sha256": "…"}

exported_step is the one with the best τ, or the last. Written last, after the last export and the final decoding;
nothing else marks a run as finished. The hash is over the files that hold the drafter, so the model card may be
edited.
"""

import hashlib
import json
from collections.abc import Callable

from etils import epath

from domino_jax.runtime.files import write_whole
from domino_jax.training import manifest

NAME = "finished.json"
FIELDS = {"step": int, "processes": int, "exported_step": int, "export_sha256": str}


def mark_finished(workdir: epath.Path, step: int, processes: int, exported_step: int) -> None:
    """Write the marker for the export as it is now; by process 0 alone."""
    content = export_hash(workdir / "export")
    marker = {"step": step, "processes": processes, "exported_step": exported_step, "export_sha256": content}
    write_whole(workdir / NAME, json.dumps(marker).encode())


def read_marker(workdir: epath.Path, steps: int, report: Callable[[str], None]) -> dict | None:
    """The marker of a run that took at least `steps` steps and whose export is intact; else None.

    Args:
      report: takes a line for a marker that does not fit. The run then continues from its checkpoint, which exports
        again.
    """
    marker = parse_marker(workdir, report)
    if marker is None:
        return None
    if marker["step"] < steps:
        report(f"the run in {workdir} ended at step {marker['step']}; train.steps is {steps}")
        return None
    if marker["export_sha256"] != export_hash(workdir / "export"):
        report(f"warning: {workdir / 'export'} changed since the run ended: it is exported again from its checkpoint")
        return None
    return marker


def parse_marker(workdir: epath.Path, report: Callable[[str], None]) -> dict | None:
    """The marker as it was written, whatever happened to the export; None without one that can be read."""
    try:
        marker = json.loads((workdir / NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        report(f"warning: {workdir / NAME} is unreadable ({type(error).__name__}); the run counts as unfinished")
        return None
    if not isinstance(marker, dict) or any(type(marker.get(name)) is not kind for name, kind in FIELDS.items()):
        report(f"warning: {workdir / NAME} names no step or no export; the run counts as unfinished")
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
