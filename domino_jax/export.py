"""The drafter of a training run as a public Hugging Face folder: what SGLang serves and `decode` reads.

    python -m domino_jax.export --workdir=/tmp/domino --output=DRAFTER

Takes the checkpoint with the best τ, or the newest where none was measured; of a run that averages its weights,
the average. The checkpoint may come from any mesh: it is read into this host's memory, without an accelerator, and
nothing in the workdir changes. `train` writes the same folder as WORKDIR/export by itself.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from domino_jax.evals.model_card import model_card
from domino_jax.method.drafter import init_drafter_params
from domino_jax.method.drafters import AnyConfig, config_class, new_drafter, parse_config
from domino_jax.recipe import cli
from domino_jax.runtime.differences import differences
from domino_jax.runtime.errors import DataError, DominoError, first_line
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.remote import copy_folder, open_path
from domino_jax.training.checkpoints import UNREADABLE, Checkpoints
from domino_jax.weights import hf, servers, speculators
from domino_jax.weights.drafter import EXPORT_DTYPE, save_drafter

DRAFTER_CONFIG = "drafter_config.json"
# Holds "step", "exported_step" (the best by τ, or the last) and "target" (its identity) of a run that is over.
FINISHED = "finished.json"
WORKDIR = "the workdir of a training run"
# What an export replaces.
OWN_NAMES = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|config\.json|README\.md|token_order\.st|\..+\.[0-9a-f]+\.tmp"
)


def main(flags: cli.Flags) -> None:
    # An export needs memory, not an accelerator, which a training run may hold.
    jax.config.update("jax_platforms", "cpu")
    workdir = open_path(flags.workdir).expanduser()
    if not workdir.is_dir():
        raise DominoError(f"--workdir={workdir} is not a folder; give the folder of a training run.")
    raw = hf.read_json(workdir, DRAFTER_CONFIG, kind=WORKDIR)
    with hf.naming(workdir, DRAFTER_CONFIG):
        config = parse_config(raw)
    recipe = hf.read_json(workdir, "config.json", kind=WORKDIR)
    refuse_other_model(flags.output)
    with Checkpoints(workdir, keep=1) as checkpoints:  # nothing is saved here, so nothing is dropped either
        step, tau = choose_step(checkpoints)
        field = "ema" if recipe["train"]["ema_decay"] > 0 else "params"
        params = restore_params(checkpoints.folders.path(step), config, field)
    write_export(
        flags.output,
        config,
        params,
        recipe,
        step,
        report=final_report(workdir, step),
        data=read_data(workdir),
        tau=tau,
        token_order=read_token_order(workdir),
    )
    measured = f", the best of the run with a τ of {tau:.2f}," if tau is not None else ""
    print(f"wrote the drafter of step {step}{measured} to {flags.output}")
    if note := servers.serving_note(config):
        print(f"note: {note}")


def refuse_other_model(folder: str | os.PathLike) -> None:
    """Refuses a folder with the config.json of a target or of a run, which an export would replace with its weights."""
    try:
        raw = hf.read_json(open_path(folder).expanduser(), "config.json", required=False)
        if raw and not speculators.is_speculators(raw):
            config_class(raw)
    except DataError:
        raise DominoError(
            f"--output={folder} has a config.json that is not a drafter's, and the export would replace it.\n"
            "Name another folder."
        ) from None


def write_export(
    folder: str | os.PathLike,
    config: AnyConfig,
    params: Mapping[str, Any],
    recipe: Mapping[str, Any],
    step: int,
    report: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    tau: float | None = None,
    token_order: bytes | None = None,
) -> None:
    """Writes weights and config.json in the public layout, and a README.md about their origin.

    Every process calls it with the same arguments; process 0 writes. In a folder, local or gs://, the files of an
    earlier export are replaced and all others stay.

    Args:
        params: the drafter's, on the host or on devices.
        recipe: the resolved recipe (recipe/loading.py).  step: optimizer steps done.
        report: of the run's final decoding, once there is one.  data: "data" of the run's preflight.json.
        tau: the step's τ, when it was measured in training.
        token_order: as of read_token_order.
    """
    params = on_host(params)
    if jax.process_index() != 0:
        return
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    card = model_card(config, weights, EXPORT_DTYPE, recipe, step, report=report, data=data, tau=tau)

    def fill(fresh: Path) -> None:
        save_drafter(fresh, config, params)
        (fresh / "README.md").write_text(card, encoding="utf-8")
        if token_order:
            (fresh / hf.TOKEN_ORDER).write_bytes(token_order)

    if is_remote(folder):
        with tempfile.TemporaryDirectory() as local:
            fill(Path(local))
            upload(Path(local), open_path(folder))
    else:
        with hf.whole_folder(folder, OWN_NAMES) as fresh:
            fill(fresh)


def upload(local: Path, folder: epath.Path) -> None:
    """Object stores have no folders to rename: config.json goes first and comes last, so no reader takes half of it."""
    (folder / "config.json").unlink(missing_ok=True)
    names = {file.name for file in local.iterdir()}
    for left in folder.iterdir() if folder.exists() else ():  # without an object there is no folder
        if OWN_NAMES.fullmatch(left.name) and left.name not in names:
            left.unlink()
    copy_folder(local, folder, "config.json")


def on_host(params: Mapping[str, Any]) -> dict[str, Any]:
    """Whole arrays in this host's memory, from any mesh; leaf by leaf, so that no device holds two."""

    def fetch(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(fetch, params)


def read_token_order(workdir: epath.Path) -> bytes | None:
    """The tokens of the run's rows by frequency (weights/draft_vocab.py); None where the run stored none."""
    path = workdir / hf.TOKEN_ORDER
    return path.read_bytes() if path.exists() else None


def read_data(workdir: epath.Path) -> dict[str, Any] | None:
    """ "data" of a run's preflight.json; None without that file."""
    return hf.read_json(workdir, "preflight.json", required=False).get("data")


def final_report(workdir: epath.Path, step: int) -> dict[str, Any] | None:
    """The report of a run's final decoding, if it decoded the drafter of this step."""
    if hf.read_json(workdir, FINISHED, required=False).get("exported_step") != step:
        return None
    return hf.read_json(workdir / "report", "report.json", required=False) or None


def choose_step(checkpoints: Checkpoints) -> tuple[int, float | None]:
    """(step, its τ if it is the best by τ) of the checkpoint to export: the best, else the newest, if it is intact."""
    folders, damaged = checkpoints.folders, {}
    best, tau = checkpoints.best() or (None, None)
    newest = [step for step in reversed(folders.finished()) if step != best]
    for step in newest if best is None else (best, *newest):
        damage = folders.damage(step)
        if damage is None:
            return step, tau if step == best else None
        damaged[step] = damage
        print(f"warning: the checkpoint of step {step} is damaged and skipped ({damage})")
    raise folders.loss(damaged)


def restore_params(folder: epath.Path, config: AnyConfig, field: str = "params", places: Any = None) -> dict[str, Any]:
    """Float32 drafter parameters of the checkpoint in a folder; the optimizer's moments are not read.

    Args:
        field: of the TrainState, "params" or "ema".
        places: a sharding for every parameter; None: numpy arrays, whatever devices they were saved from. With
            shardings every process calls it.
    """
    drafter = new_drafter(config, np.dtype("float32"))
    shapes = jax.eval_shape(lambda key: init_drafter_params(drafter, key), jax.random.key(0))
    if places is None:
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
    else:
        how = jax.tree.map(lambda place: ocp.ArrayRestoreArgs(sharding=place), places)
    arguments = ocp.args.PyTreeRestore({field: shapes}, restore_args={field: how}, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        try:
            # First, because a restoration leaves out what is not asked for.
            stored = ocp.PyTreeCheckpointHandler().metadata(folder / "state").tree[field]
            wrong = differences(*(jax.tree.map(lambda leaf: list(leaf.shape), dict(tree)) for tree in (stored, shapes)))
            if not wrong:
                return reader.restore(folder / "state", arguments)[field]
            shapes = [f"\n  {name}: {there} there, {read} by the file" for name, (there, read) in wrong.items()]
            reason = "".join(shapes[:3])
        except UNREADABLE as error:
            reason = f"\n{first_line(error, with_class=False)}"
    raise DataError(f"the checkpoint {folder} does not hold the drafter that {DRAFTER_CONFIG} describes:{reason}")


if __name__ == "__main__":
    cli.run(main, required=("workdir", "output"))
