"""Compile the real training step, and the evaluations between steps, from shapes alone and report their cost.

    python -m domino_jax.train --config=configs/qwen3_8b.py --workdir=DIR --dry_run --topology=v5e:4x4 \\
        --config.train.batch_size=16

It needs no weights, no data and no accelerator, only the compiler of one. Without --topology it compiles for the
devices of this machine. <workdir>/dry_run.json holds the figures of the step and, under "evaluation", those of an
evaluation (null with eval.every=0). All are the compiler's or arithmetic on shapes; none is measured.
"""

import json
import pathlib
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from domino_jax.forecast import compiled, topologies
from domino_jax.forecast.dry_run_evaluation import examine_evaluation, on_chip
from domino_jax.forecast.dry_run_evaluation import lines as evaluation_lines
from domino_jax.method.kinds import AnyDrafter
from domino_jax.models import sharding
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.recipe import builders, cli
from domino_jax.runtime.files import write_whole
from domino_jax.runtime.remote import open_path
from domino_jax.training import estimates
from domino_jax.training.console import say_bytes
from domino_jax.training.estimates import device_bytes
from domino_jax.weights import loading

# Shapes of the public sizes, so that neither a hub nor a folder is needed.
SHAPES = pathlib.Path(__file__).resolve().parents[2] / "assets" / "qwen3_configs"
LARGE = 8  # arrays named in the listing
GB = 1e9


def main(flags: cli.Flags) -> None:
    config = flags.config
    devices = topologies.devices_of(flags.topology) if flags.topology else jax.devices()
    found = examine(config, devices, flags.topology or devices[0].device_kind)
    folder = open_path(flags.workdir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "dry_run.json", json.dumps(found, indent=2) + "\n")
    print("\n".join(lines(found)), flush=True)


def examine(config, devices: list[jax.Device], topology: str) -> dict[str, Any]:
    """Everything that dry_run.json holds, of the step of this recipe on these devices."""
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    sharding.check_rows(mesh, config.train.batch_size, config.train.accumulate)
    loading.use_exact_matmuls(config.target.dtype)
    target_config = shapes_of(config.target.path)
    drafter_config = builders.drafter_config_of(config, target_config)
    target = Qwen3(target_config, np.dtype(config.target.dtype))
    drafter = builders.drafter_of(drafter_config, config)
    params = target_shapes(target, mesh)
    with jax.set_mesh(mesh):
        begin = time.perf_counter()
        traced, state = trace_step(config, target, drafter, mesh)
        lowered = traced.lower()
        traced_at = time.perf_counter()
        program = lowered.compile()
        seconds = time.perf_counter() - traced_at
    rows = config.train.batch_size
    counted = estimates.step_flops(
        target_config,
        drafter_config,
        length=config.data.max_length,
        anchors=config.train.num_anchors,
        distill=builders.loss_settings(config.train, config.drafter.head).reads_target,
        passes=config.train.eagle3.passes,
    )
    found = {
        "topology": topology,
        "chips": mesh.size,
        "processes": len({device.process_index for device in mesh.devices.flat}),
        "mesh": dict(mesh.shape),
        "rows": rows,
        "max_length": config.data.max_length,
        "num_anchors": config.train.num_anchors,
        "trace_seconds": traced_at - begin,
        "compile_seconds": seconds,
        "lean_flops": counted["lean"] * rows,
        "hours": estimates.run_hours(config.train.steps * counted["lean"] * rows, topology, mesh.size),
        "naive_flops": counted["naive"] * rows,
        "flops": compiled.product_flops(traced.jaxpr),
        "target_bytes_per_chip": device_bytes(params),
        "parameter_bytes_per_chip": device_bytes((state.params, state.ema)),
        "optimizer_bytes_per_chip": device_bytes(state.opt_state),
        "collectives": compiled.collectives(program.as_text()),
        "largest": largest(params, state),
    }
    found |= measures(program, found, topology)
    found["evaluation"] = None
    if config.eval.every:
        judged = examine_evaluation(config, target, drafter, mesh, state, params)
        chip = on_chip(judged, config.eval.every, found["floor_seconds"], topology)
        found["evaluation"] = judged | chip
    return found


def trace_step(config, target: Qwen3, drafter: AnyDrafter, mesh: Mesh) -> tuple[jax.stages.Traced, Any]:
    """The step of this recipe as it is before a compiler sees it, and the shapes of its state."""
    optimizer = builders.optimizer_of(config.train)
    _, state = builders.state_maker(config.train, drafter, optimizer, mesh)
    step = builders.train_step_of(config.train, target, drafter, optimizer, mesh, state)
    return step.trace(state, target_shapes(target, mesh), batch_shapes(config, mesh), key_shape(mesh)), state


def measures(program: jax.stages.Compiled, found: dict[str, Any], topology: str) -> dict[str, Any]:
    """The compiler's figures of the program, and a lower bound of the step's time on a known chip."""
    memory, cost = compiled.memory(program), compiled.cost(program)
    chip, peak = topologies.chip_of(topology), estimates.peak_flops(topology)
    extra = {
        "peak_bytes_per_chip": memory["peak"],
        "argument_bytes_per_chip": memory["arguments"],
        "temporary_bytes_per_chip": memory["temporary"],
        "bytes_accessed": cost["bytes_accessed"] if "bytes_accessed" in cost else None,
        "compiler_seconds": cost["seconds"] if "seconds" in cost else None,
        "chip_bytes": chip.memory if chip else None,
        "fits": memory["peak"] < chip.memory if chip else None,
        "floor_seconds": None,
        "rows_per_second_per_chip": None,
    }
    if chip and peak:
        moved = sum(entry["bytes"] for entry in found["collectives"].values())
        floors = {
            "products": found["flops"] / found["chips"] / peak,
            "memory": (extra["bytes_accessed"] or 0.0) / chip.bandwidth,
            "links": moved / chip.links,
        }
        slowest = max(floors.values())
        extra |= {
            "floors": floors,
            "floor_seconds": slowest,
            "rows_per_second_per_chip": found["rows"] / found["chips"] / slowest,
        }
    return extra


# ------------------------------------------------------------------------------------------------------ shapes


def shapes_of(path: str) -> Qwen3Config:
    """The target's config: of a local folder, of a public size by its hub id, else from the hub."""
    size = re.fullmatch(r"Qwen/Qwen3-([\d.]+B)(?:-Base)?", str(path))
    known = SHAPES / size[1].lower() if size else None
    return loading.read_target_config(known if known and known.is_dir() else path)


def target_shapes(target: Qwen3, mesh: Mesh) -> dict:
    """Shapes of the target's parameters with their shardings."""
    params = jax.eval_shape(lambda: target.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32)))["params"]
    places = sharding.param_shardings(mesh, params, target.config.num_key_value_heads)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, target.dtype, sharding=place), params, places)


def batch_shapes(config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of the recipe; with buckets the longest, which costs the most."""
    rows, length = config.train.batch_size, config.data.max_length
    kinds = {"tokens": np.int32, "loss_mask": np.float32}
    if config.data.layout == "pack":
        kinds |= {"positions": np.int32, "documents": np.int32}
    place = sharding.batch_sharding(mesh)
    batch = {name: jax.ShapeDtypeStruct((rows, length), kind, sharding=place) for name, kind in kinds.items()}
    return batch | {"row_ids": jax.ShapeDtypeStruct((rows,), np.int32, sharding=place)}


def key_shape(mesh: Mesh) -> jax.ShapeDtypeStruct:
    kind = jax.eval_shape(lambda: jax.random.key(0)).dtype
    return jax.ShapeDtypeStruct((), kind, sharding=sharding.replicated(mesh))


def largest(params: Any, state: Any) -> list[dict[str, Any]]:
    """The largest kinds of arrays: one line for all layers' matrices of a kind."""
    kinds: dict[tuple, dict[str, Any]] = {}
    for part, tree in (("target", params), ("drafter", state.params), ("optimizer", state.opt_state)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = re.sub(r"layers_\d+", "layers", jax.tree_util.keystr(path, simple=True, separator="/"))
            entry = kinds.setdefault(
                (part, name, leaf.shape),
                {"array": f"{part} {name}", "shape": list(leaf.shape), "dtype": leaf.dtype.name, "count": 0, "bytes": 0}
                | {"sharding": str(leaf.sharding.spec)},
            )
            entry["count"] += 1
            entry["bytes"] += leaf.size * leaf.dtype.itemsize
    return sorted(kinds.values(), key=lambda entry: -entry["bytes"])[:LARGE]


# ------------------------------------------------------------------------------------------------------ printing


def lines(found: dict[str, Any]) -> list[str]:
    """What is printed: figures of one chip, each with its source."""
    target, drafter, optimizer = (
        say_bytes(found[f"{part}_bytes_per_chip"]) for part in ("target", "parameter", "optimizer")
    )
    room = ""
    if found["chip_bytes"]:
        room = f" of {found['chip_bytes'] / GB:.0f} GB: {'fits' if found['fits'] else 'DOES NOT FIT'}"
    mesh = " × ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    out = [
        f"{found['topology']}: {found['chips']} chips in {found['processes']} processes, mesh {mesh}",
        f"step: {found['rows']} rows of {found['max_length']} tokens, {found['num_anchors']} anchors each",
        f"compiled in {found['compile_seconds']:.0f} s (traced and lowered in {found['trace_seconds']:.0f} s)",
        "",
        "bytes on one chip",
        f"  target {target}, drafter {drafter}, optimizer {optimizer}",
        f"  temporary (activations, gathered weights) {say_bytes(found['temporary_bytes_per_chip'])}",
        f"  peak {found['peak_bytes_per_chip'] / GB:.2f} GB{room}",
        "",
        "a step on all chips",
        f"  lean {found['lean_flops'] / 1e12:,.1f} TFLOP, naive 6ND {found['naive_flops'] / 1e12:,.1f}, this program's "
        f"products {found['flops'] / 1e12:,.1f} (what is computed twice counts twice)",
    ]
    if found["bytes_accessed"]:
        out.append(f"  bytes accessed, by the compiler, loop bodies once: {say_bytes(found['bytes_accessed'])} a chip")
    if found["compiler_seconds"]:
        out.append(f"  the compiler's own estimate, loop bodies once: {found['compiler_seconds'] * 1e3:.0f} ms")
    else:
        out.append("  the compiler gives no time for this program")
    if found["floor_seconds"]:
        floors = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in found["floors"].items())
        out.append(f"  no faster than {found['floor_seconds'] * 1e3:.0f} ms at the chip's data sheet ({floors})")
    if found["hours"]:
        out.append(f"  all steps: {found['hours']:,.0f} hours at {estimates.UTILISATION:.0%} of the chips' peak")
    out += ["", "collectives (results on one chip)"]
    for kind, entry in found["collectives"].items():
        out.append(f"  {kind}: {entry['count']}, {say_bytes(entry['bytes'])}, {entry['in_loops']} of them in loops")
    if not found["collectives"]:
        out.append("  none")
    if found["evaluation"]:
        out += evaluation_lines(found["evaluation"], found["chip_bytes"])
    out += ["", "largest arrays"]
    for entry in found["largest"]:
        shape = "×".join(map(str, entry["shape"]))
        out.append(f"  {entry['array']}: {entry['count']} of {shape} {entry['dtype']}, {entry['sharding']}")
    return out
