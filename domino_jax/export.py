"""The drafter of a training run as a public Hugging Face folder: what SGLang serves and `decode` reads.

    python -m domino_jax.export --workdir=/tmp/domino --output=DRAFTER

Takes the newest checkpoint of the workdir. `train` writes the same folder as WORKDIR/export by itself.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from domino_jax import cli
from domino_jax.checkpoint import UNREADABLE, Checkpoints
from domino_jax.drafter.convert import save_drafter
from domino_jax.drafter.model import Drafter, DrafterConfig
from domino_jax.errors import DataError, DominoError
from domino_jax.report import read_report, versions, write_text
from domino_jax.training.state import init_drafter_params

# What public drafters are stored in.
EXPORT_DTYPE = "bfloat16"
DRAFTER_CONFIG = "drafter_config.json"
TRAINING_PACKAGES = ("optax", "orbax-checkpoint", "grain")


def main(flags: cli.Flags) -> None:
    workdir, output = Path(flags.workdir).expanduser(), Path(flags.output).expanduser()
    if not workdir.is_dir():
        raise DominoError(f"--workdir={workdir} is no folder; name the folder of a training run.")
    config = DrafterConfig.from_dict(read_json(workdir / DRAFTER_CONFIG))
    recipe = read_json(workdir / "config.json")
    step, params = restore_params(workdir, config)
    write_export(output, config, params, recipe, step, read_report(workdir / "report"))
    print(f"wrote the drafter of step {step} to {output}")


def write_export(
    folder: Path,
    config: DrafterConfig,
    params: Mapping[str, Any],
    recipe: Mapping[str, Any],
    step: int,
    report: Mapping[str, Any] | None = None,
) -> None:
    """Writes weights and config.json in the public layout, and a README.md that says where they come from.

    Args:
        recipe: the resolved recipe (config.resolved).  step: optimizer steps done.
        report: of the run's final decoding, once there is one.
    """
    save_drafter(folder, config, params, EXPORT_DTYPE)
    write_text(Path(folder).expanduser() / "README.md", model_card(config, count_weights(params), recipe, step, report))


def count_weights(params: Mapping[str, Any]) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object that a training run left."""
    if not path.is_file():
        raise DataError(f"{path} does not exist: {path.parent} is not the workdir of a training run.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error}).") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} holds a {type(value).__name__}, expected a JSON object.")
    return value


def restore_params(workdir: Path, config: DrafterConfig) -> tuple[int, dict[str, Any]]:
    """(step, float32 drafter parameters) of the newest checkpoint; the optimizer's moments are not read."""
    if not (workdir / "checkpoints").is_dir():
        raise DataError(f"{workdir} holds no checkpoints; the run has not saved one yet.")
    with Checkpoints(workdir, keep=1) as checkpoints:  # nothing is saved here, so nothing is dropped either
        steps, folder = checkpoints.steps(), checkpoints.folder
    if not steps:
        raise DataError(f"{folder} holds no finished checkpoint; the run has not saved one yet.")
    drafter = Drafter(config, np.dtype("float32"))
    shapes = jax.eval_shape(lambda key: init_drafter_params(drafter, key), jax.random.key(0))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        "params": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
    }
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    arguments = ocp.args.PyTreeRestore(
        wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    try:
        return steps[-1], reader.restore(folder / str(steps[-1]) / "state", arguments)["params"]
    except UNREADABLE as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise DataError(
            f"the checkpoint {folder / str(steps[-1])} does not hold the drafter"
            f" that {DRAFTER_CONFIG} describes:\n{reason}"
        ) from error
    finally:
        reader.close()


def model_card(
    config: DrafterConfig, weights: int, recipe: Mapping[str, Any], step: int, report: Mapping[str, Any] | None
) -> str:
    """README.md of the exported folder."""
    target, data, train = public_name(recipe["target"]["path"]), recipe["data"], recipe["train"]
    kind = "Domino" if config.has_head else "DFlash"
    packages = {**versions(), **{name: importlib.metadata.version(name) for name in TRAINING_PACKAGES}}
    lines = [
        "---",
        f"base_model: {json.dumps(target)}",
        "tags: [speculative-decoding, domino]",
        "---",
        "",
        f"# {kind} drafter for {target}",
        "",
        f"A {kind} speculative-decoding drafter (arXiv 2605.29707): it proposes blocks of tokens that the target"
        " verifies in one pass. It never changes what the target says, only how fast. It holds no embeddings; those"
        " are the target's.",
        "",
        f"- weights: {weights:,}, {EXPORT_DTYPE}; draft layers: {config.num_hidden_layers}",
        f"- block size {config.block_size}, shift_label {str(config.shift_label).lower()}, mask token"
        f" {config.mask_token_id}, target layers {list(config.target_layer_ids)}",
        "",
        "## Training",
        "",
        f"- steps: {step:,} of {train['steps']:,}, {train['batch_size']} rows each,"
        f" {train['num_anchors']} anchors a row",
        f"- data: {public_name(data['train'])}{' (answers regenerated by the target)' if data['regenerate'] else ''},"
        f" at most {data['max_length']} tokens a row",
        f"- {train['optimizer']}, learning rate {train['learning_rate']:g}, seed {recipe['seed']}",
        "",
        *measured_lines(report),
        "## Use",
        "",
        "```",
        "python -m domino_jax.decode --config=RECIPE --config.drafter.path=THIS_FOLDER --output=DIR",
        "```",
        "",
        f"Written with {', '.join(f'{name} {version}' for name, version in packages.items())}.",
    ]
    return "\n".join(lines) + "\n"


def public_name(path: str) -> str:
    """A hub id as it is, a local path's last part: where files lie on one machine is nothing to publish."""
    return Path(path).name if path.startswith(("/", ".", "~")) else path


def measured_lines(report: Mapping[str, Any] | None) -> list[str]:
    """τ by mode, when the run has decoded its held-out prompts."""
    if report is None:
        return []
    lines = [
        "## Measured",
        "",
        f"{report['prompts']['count']} held-out prompts, {report['dtype']}, {report['device']}:",
        "",
    ]
    for mode, figures in report["modes"].items():
        if figures["tau_pooled"] is not None:
            faster = f", {figures['speedup']:.2f} × the target alone" if figures["speedup"] else ""
            lines.append(
                f"- {mode}: τ {figures['tau_pooled']:.2f} pooled, {figures['tau_per_prompt']:.2f} per prompt{faster}"
            )
    return [*lines, ""]


if __name__ == "__main__":
    cli.run(main, required=("workdir", "output"))
