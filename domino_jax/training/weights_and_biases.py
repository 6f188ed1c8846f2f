"""Rows of a run to Weights & Biases, when a recipe asks for it (train.wandb) and the package is installed."""

import importlib.util
import queue
import threading
import uuid
from collections.abc import Mapping
from typing import Any

from etils import epath

from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import is_remote, write_whole

WAITING_ROWS = 10_000  # rows waiting for a slow connection; those beyond are dropped and counted
SECONDS_TO_FINISH = 60.0


def require_wandb(project: str) -> None:
    """Refuses a recipe that asks for Weights & Biases where it is not installed; call it before anything is loaded."""
    if project and importlib.util.find_spec("wandb") is None:
        raise DominoError(
            f"train.wandb is {project!r}, but Weights & Biases is not installed: pip install wandb\n"
            'or leave it out: --config.train.wandb="".'
        )


class WandbLog:
    """One Weights & Biases run per workdir, continued by later starts (its id is in <workdir>/wandb_id).

    All calls to the service are made by a separate thread, so that no step waits for a network. A service that
    fails costs one line, never the run.
    """

    def __init__(self, project: str, workdir: epath.Path, recipe: Mapping[str, Any], say=print):
        require_wandb(project)
        # A remote workdir has no place for the package's own files; it then takes its default.
        folder = None if is_remote(workdir) else str(workdir)
        self._settings = {"project": project, "id": _run_id(workdir), "dir": folder, "config": dict(recipe)}
        self._say = say
        self._rows: queue.Queue = queue.Queue(WAITING_ROWS)
        self._dropped = 0
        self._thread = threading.Thread(target=self._send, name="wandb", daemon=True)
        self._thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Hands a row over and returns at once."""
        try:
            self._rows.put_nowait(dict(row))
        except queue.Full:
            self._dropped += 1

    def _send(self) -> None:
        import wandb

        try:
            run = wandb.init(**self._settings, resume="allow")
            # A start that went back to a checkpoint logs steps again; with "step" as the metric they are accepted.
            run.define_metric("*", step_metric="step")
            while (row := self._rows.get()) is not None:
                run.log(row)
            run.finish()
        except (wandb.Error, OSError) as error:
            self._say(f"Weights & Biases: {error}; the run goes on without it.")

    def close(self) -> None:
        """Sends what is left, for at most SECONDS_TO_FINISH."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            self._dropped += self._rows.qsize()
        else:
            self._thread.join(SECONDS_TO_FINISH)
        if self._dropped:
            self._say(f"Weights & Biases: {self._dropped} rows were not sent; metrics.jsonl holds them all.")


def _run_id(workdir: epath.Path) -> str:
    file = workdir / "wandb_id"
    if not file.exists():
        write_whole(file, uuid.uuid4().hex[:16] + "\n")
    return file.read_text().strip()
