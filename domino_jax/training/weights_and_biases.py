"""Rows of a run to Weights & Biases, when a recipe asks for it (train.wandb) and the package is installed."""

import importlib.util
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import is_remote, write_whole


def require_wandb(project: str) -> None:
    """Refuses a recipe that asks for Weights & Biases where it is not installed; call it before anything is loaded."""
    if project and importlib.util.find_spec("wandb") is None:
        raise DominoError(
            f"train.wandb is {project!r}, but Weights & Biases is not installed: pip install wandb\n"
            'or leave it out: --config.train.wandb="".'
        )


def start_run(project: str, workdir: epath.Path, recipe: Mapping[str, Any], say: Callable[[str], None]) -> Any:
    """The workdir's run, continued by later starts (its id is in <workdir>/wandb_id); None when the service fails."""
    require_wandb(project)
    import wandb

    # A remote workdir has no place for the package's own files; it then takes its default.
    folder = None if is_remote(workdir) else str(workdir)
    try:
        run = wandb.init(project=project, id=_run_id(workdir), dir=folder, config=dict(recipe), resume="allow")
    except (wandb.Error, OSError) as error:
        say(f"Weights & Biases: {error}; the run goes on without it.")
        return None
    # A start that went back to a checkpoint logs steps again; with "step" as the metric they are accepted.
    run.define_metric("*", step_metric="step")
    return run


def _run_id(workdir: epath.Path) -> str:
    file = workdir / "wandb_id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex[:16] + "\n")
    return file.read_text().strip()
