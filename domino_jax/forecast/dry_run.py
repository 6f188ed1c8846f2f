"""Compile the real training step, and the evaluations between steps, from shapes alone and report their cost.

    python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=DIR --dry_run --topology=v5e:4x4 \\
        --config.train.batch_size=16

It needs no weights, no data and no accelerator, only the compiler of one. Without --topology it compiles for the
devices of this machine. <workdir>/dry_run.json holds the figures of the step and, under "evaluation", of an
evaluation (null with eval.every=0): memory and bytes by the compiler, FLOPs by the products of the traced step.
"""

import functools
import pathlib
import re
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from domino_jax.forecast import compiled, topologies
from domino_jax.method.drafters import AnyDrafter
from domino_jax.method.exact import OF_ANCHORS, accepted_drafts
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingParams
from domino_jax.models import sharding
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.recipe import builders, cli
from domino_jax.runtime.json_files import write_json
from domino_jax.runtime.remote import open_path
from domino_jax.runtime.sizes import device_bytes, say_bytes
from domino_jax.training import flops
from domino_jax.weights import loading
from domino_jax.weights import target as weights_target
from domino_jax.weights.quantization import PUBLIC_FP8, Scheme, read_scheme

# Shapes of the public sizes, so that neither a hub nor a folder is needed.
SHAPES = pathlib.Path(__file__).resolve().parents[2] / "assets" / "qwen3_configs"


def main(flags: cli.Flags) -> None:
    config = flags.config
    devices = topologies.devices_of(flags.topology) if flags.topology else jax.devices()
    print("compiling; a step for 16 TPU chips takes 4 to 6 CPU minutes (docs/training.md)", flush=True)
    figures = examine(config, devices, flags.topology or devices[0].device_kind)
    folder = open_path(flags.workdir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "dry_run.json", figures)
    print("\n".join(lines(figures)), flush=True)


def examine(config, devices: list[jax.Device], topology: str) -> dict[str, Any]:
    """Everything that dry_run.json holds, of the step of this recipe on these devices."""
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    sharding.check_rows(mesh, config.train.batch_size, config.train.accumulate)
    loading.use_exact_matmuls(config.target.dtype)
    target_config = shapes_of(config.target.path)
    drafter_config = builders.drafter_config_of(config, target_config)
    target = Qwen3(target_config, np.dtype(config.target.dtype))
    drafter = builders.drafter_of(drafter_config, config)
    with jax.set_mesh(mesh):
        traced, state, params = trace_step(config, target, drafter, mesh)
        lowered = traced.lower()
        begin = time.perf_counter()
        program = lowered.compile()
    figures = {
        "topology": topology,
        "chips": mesh.size,
        "mesh": dict(mesh.shape),
        "rows": config.train.batch_size,
        "max_length": config.data.max_length,
        "num_anchors": config.train.num_anchors,
        "compile_seconds": time.perf_counter() - begin,
        "flops": flops.product_flops(traced.jaxpr),
        "target_bytes_per_chip": device_bytes(params),
        "parameter_bytes_per_chip": device_bytes((state.params, state.ema)),
        "optimizer_bytes_per_chip": device_bytes(state.opt_state),
    }
    memory, cost = compiled.memory(program), compiled.cost(program)
    figures["peak_bytes_per_chip"] = memory["peak"]
    figures["temporary_bytes_per_chip"] = memory["temporary"]
    figures["bytes_accessed"] = cost["bytes_accessed"] if "bytes_accessed" in cost else None
    figures["evaluation"] = None
    if config.eval.every:
        with jax.set_mesh(mesh):
            models = Pair(target, params, drafter, state.best_params)
            figures["evaluation"] = examine_evaluation(config, models, mesh, device_bytes((params, state)))
    chip = topologies.chip_of(topology)
    figures["chip_bytes"] = chip.memory if chip else None
    for part in filter(None, (figures, figures["evaluation"])):
        part["fits"] = part["peak_bytes_per_chip"] < chip.memory if chip else None
    return figures


def trace_step(config, target: Qwen3, drafter: AnyDrafter, mesh: Mesh) -> tuple[jax.stages.Traced, Any, Any]:
    """The step of this recipe as it is before a compiler sees it, the shapes of its state and of the target."""
    optimizer = builders.optimizer_of(config.train)
    _, state = builders.state_maker(config.train, drafter, optimizer, mesh)
    step = builders.train_step_of(config, target, drafter, optimizer, mesh, state)
    params = target_shapes(target, mesh, scheme_of(config.target.path, config.target.quantize))
    rows = batch_shapes(config, mesh, config.data.max_length)
    return step.trace(state, params, rows, key_shape(mesh)), state, params


def examine_evaluation(config, models: Pair, mesh: Mesh, resident: int) -> dict[str, Any]:
    """The figures of a pass over answers (decoding/answers.py), its rows full of places to judge, for "evaluation" in
    dry_run.json. resident: bytes of the target and the training state on a chip."""
    length, rows = config.data.max_length, config.train.batch_size // config.train.accumulate
    whole = jax.ShapeDtypeStruct((rows, length), np.int32, sharding=sharding.batch_sharding(mesh))
    batch = dict.fromkeys(("tokens", "positions", "documents", *OF_ANCHORS), whole)
    drafting = builders.chain_drafting(config, models.drafter.config)
    judge = functools.partial(accepted_drafts, settings=drafting, kind=SamplingParams().kind)
    memory = compiled.memory(jax.jit(judge, out_shardings=sharding.replicated(mesh)).lower(models, batch).compile())
    temporary = memory["temporary"] + memory["output"]
    # The target and the training state stay in memory, also what a pass does not read.
    return {"rows": rows, "temporary_bytes_per_chip": temporary, "peak_bytes_per_chip": resident + temporary}


# ------------------------------------------------------------------------------------------------------ shapes


def shapes_of(path: str) -> Qwen3Config:
    """The target's config: of a local folder, of a public size by its hub id, else from the hub."""
    return weights_target.read_target_config(_known(path) or path)


def scheme_of(path: str, quantize: str | None) -> Scheme | None:
    """The matrices of the target that are in eight bits; paths as for shapes_of."""
    known = _known(path)
    if known and str(path).endswith("-FP8"):
        return read_scheme({"quantization_config": PUBLIC_FP8}, quantize)
    return weights_target.read_target_scheme(known or path, quantize)


def _known(path: str) -> pathlib.Path | None:
    size = re.fullmatch(r"Qwen/Qwen3-([\d.]+B(?:-A\d+B)?)(?:-Base|-FP8)?", str(path))
    known = SHAPES / size[1].lower() if size else None
    return known if known and known.is_dir() else None


def target_shapes(target: Qwen3, mesh: Mesh, scheme: Scheme | None = None) -> dict:
    """Shapes of the target's parameters with their shardings."""
    params = weights_target.target_shapes(target.config, target.dtype, scheme)
    places = sharding.param_shardings(mesh, params, target.config.num_key_value_heads)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places)


def batch_shapes(config, mesh: Mesh, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of the recipe's rows, cut to `length` tokens."""
    rows = config.train.batch_size
    kinds = {"tokens": np.int32, "loss_mask": np.float32}
    if config.data.layout == "pack":
        kinds |= {"positions": np.int32, "documents": np.int32}
    place = sharding.batch_sharding(mesh)
    batch = {name: jax.ShapeDtypeStruct((rows, length), kind, sharding=place) for name, kind in kinds.items()}
    return batch | {"row_ids": jax.ShapeDtypeStruct((rows,), np.int32, sharding=place)}


def key_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    kind = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
    return jax.ShapeDtypeStruct((), kind, sharding=sharding.replicated(mesh))


def lines(figures: dict[str, Any]) -> list[str]:
    """The printed lines: figures of one chip, or of one device where a chip has two."""
    target, drafter, optimizer, temporary = (
        say_bytes(figures[f"{part}_bytes_per_chip"]) for part in ("target", "parameter", "optimizer", "temporary")
    )
    mesh = " × ".join(f"{axis} {size}" for axis, size in figures["mesh"].items())
    noun = topologies.noun_of(figures["topology"])
    devices = f"{figures['chips']} {noun}s"
    moved = f", {say_bytes(figures['bytes_accessed'])} accessed by each {noun}" if figures["bytes_accessed"] else ""
    out = [
        f"{figures['topology']}: {devices}, mesh {mesh}; compiled in {figures['compile_seconds']:.0f} s",
        f"a step of {figures['rows']} rows of {figures['max_length']} tokens with {figures['num_anchors']} anchors",
        f"  target {target}, drafter {drafter}, optimizer {optimizer}, temporary {temporary}",
        f"  peak {peak_of(figures, figures['chip_bytes'])}",
        f"  {figures['flops'] / 1e12:,.1f} TFLOP in matrix products on all {noun}s{moved} (a loop's body once)",
    ]
    if evaluation := figures["evaluation"]:
        temporary = say_bytes(evaluation["temporary_bytes_per_chip"])
        out += [
            f"an evaluation, {evaluation['rows']} rows at a time: temporary {temporary}",
            f"  peak {peak_of(evaluation, figures['chip_bytes'])}",
        ]
    return out


def peak_of(figures: dict[str, Any], chip_bytes: float | None) -> str:
    """The peak of a program and whether a chip has that much."""
    limit = f" of {chip_bytes / 1e9:.0f} GB: {'fits' if figures['fits'] else 'DOES NOT FIT'}" if chip_bytes else ""
    return f"{figures['peak_bytes_per_chip'] / 1e9:.2f} GB{limit}"
