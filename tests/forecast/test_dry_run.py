"""The dry run: the real step compiled from shapes, for the devices here and (slow) for TPUs that are not."""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from domino_jax.forecast import dry_run, topologies
from domino_jax.method.drafters import new_drafter
from domino_jax.models import sharding
from domino_jax.models.qwen3 import Qwen3
from domino_jax.recipe import builders, cli
from domino_jax.runtime.errors import DominoError
from domino_jax.train import main
from domino_jax.training import flops
from tests.helpers.paths import GOLDEN, ROOT

SMALL = (
    "--config.train.batch_size=8",
    "--config.train.num_anchors=4",
    "--config.data.max_length=64",
    "--config.drafter.num_layers=1",
    "--config.train.optimizer=adamw",
    "--config.eval.every=0",
)
RELIED_ON = ("peak_bytes_per_chip", "compile_seconds", "flops", "bytes_accessed", "chips", "topology")


def flags(*extra):
    argv = ["train", "--config=configs/tiny.py", "--workdir=unused", *SMALL, *extra]
    return cli.parse(argv, ("config", "workdir"), ("dry_run", "topology"))


def test_the_command_needs_no_data_no_prompts_and_no_network(monkeypatch, tmp_path):
    figures = found()
    bare = flags("--config.train.log_every=3")
    bare.config.data.train = bare.config.eval.prompts = None
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("the network was used"))
    monkeypatch.setattr(dry_run, "examine", lambda *_: figures)
    assert main(dataclasses.replace(bare, workdir=str(tmp_path), dry_run=True)) is None
    assert json.loads((tmp_path / "dry_run.json").read_text())["rows"] == 8


@functools.lru_cache
def found():
    return dry_run.examine(flags().config, jax.devices()[:1], "cpu")


def test_it_holds_what_scripts_rely_on_as_json():
    kept = json.loads(json.dumps(found()))
    assert all(kept[key] for key in RELIED_ON)
    assert (kept["chips"], kept["rows"], kept["fits"], kept["evaluation"]) == (1, 8, None, None)


def test_the_step_multiplies_what_its_layers_say():
    """Qwen3-0.6B, a row of 3,072 tokens and 256 blocks of 16: 11.28 TFLOP, 10.08 without attention's masked part."""
    config = importlib.import_module("configs.qwen3_0_6b").get_config()
    config.train.batch_size = 1
    shapes = dry_run.shapes_of(config.target.path)
    drafter = builders.drafter_of(builders.drafter_config_of(config, shapes), config)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    traced, *_ = dry_run.trace_step(config, Qwen3(shapes, np.dtype("bfloat16")), drafter, mesh)
    assert flops.product_flops(traced.jaxpr) == pytest.approx(11.28e12, rel=1e-3)


def test_the_peak_holds_parameters_and_moments():
    assert 0.9 < found()["optimizer_bytes_per_chip"] / (2 * found()["parameter_bytes_per_chip"]) < 1.2
    # Not the target: its layers above the last tap are no arguments of the program.
    parts = ("parameter_bytes_per_chip", "optimizer_bytes_per_chip")
    assert found()["peak_bytes_per_chip"] > sum(found()[part] for part in parts)


@pytest.mark.long
def test_an_evaluation_needs_no_second_copy_of_the_weights():
    """Beside the target and the training state only what a pass makes."""
    config = flags("--config.eval.every=5", "--config.train.accumulate=2").config
    figures = dry_run.examine(config, jax.devices()[:1], "cpu")
    evaluation = json.loads(json.dumps(figures["evaluation"]))
    resident = sum(figures[f"{part}_bytes_per_chip"] for part in ("target", "parameter", "optimizer"))
    beside = evaluation["peak_bytes_per_chip"] - resident
    assert evaluation["rows"] == 4 and evaluation["fits"] is None
    assert 0 <= beside - evaluation["temporary_bytes_per_chip"] < 1_000  # counters of the state


def test_a_public_size_and_the_chip_of_a_topology_are_known(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert dry_run.shapes_of("Qwen/Qwen3-8B").hidden_size == 4096
    assert topologies.chip_of("v5e:4x4").memory == 16e9 and flops.peak_flops("v5e:4x4") == 197e12
    assert topologies.chip_of("cpu") is None and topologies.noun_of("cpu") == topologies.noun_of("v5e:4x4") == "chip"
    assert topologies.noun_of("tpu7x:2x2x1") == "device" and flops.peak_flops("TPU7x") == 1153.5e12


@pytest.mark.parametrize(
    "topology, message",
    [
        ("v9:2x2", "no such chip"),
        ("h100:16", "1 to 8"),
        ("h200:x", "1 to 8"),
        ("v5e:99x99", "its compiler gives no such"),
    ],
)
def test_a_topology_that_does_not_exist_is_refused(topology, message):
    with pytest.raises(DominoError, match=message):
        topologies.devices_of(topology)


@pytest.mark.skipif(not importlib.util.find_spec("jax_cuda12_plugin"), reason="needs requirements-compile.txt")
def test_the_gpus_of_one_machine_can_be_compiled_for():
    devices = topologies.devices_of("h100:8")
    assert ({device.process_index for device in devices}, len(devices)) == ({0}, 8)
    assert topologies.chip_of("h100:8").memory == 80e9
    assert flops.peak_flops("h100:8") == flops.peak_flops(devices[0].device_kind) == 989e12


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs requirements-compile.txt")
def test_a_machine_may_have_a_single_chip_and_a_chip_of_a_tpu7x_is_two_devices():
    assert len(topologies.devices_of("v5e:1x1")) == 1
    devices = topologies.devices_of("tpu7x:2x2x1")
    assert len(devices) == 8 and topologies.chip_of("tpu7x:2x2x1") and flops.peak_flops(devices[0].device_kind)


@pytest.mark.slow(minutes=2)
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs requirements-compile.txt")
def test_the_step_compiles_for_sixteen_chips(tmp_path):
    """The true TPU compiler, kernels included, at a public head width; a pod launch starts with this program."""
    command = [
        *(sys.executable, "-m", "domino_jax.train", "--config=configs/qwen3_0_6b.py", f"--workdir={tmp_path}"),
        *("--dry_run", "--topology=v5e:4x4", "--config.train.batch_size=16"),
        *("--config.data.max_length=512", "--config.train.num_anchors=32", "--config.drafter.num_layers=2"),
        *("--config.drafter.target_layer_ids=(1,3)", "--config.eval.every=0"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    kept = json.loads((tmp_path / "dry_run.json").read_text())
    assert (kept["chips"], kept["fits"]) == (16, True)
    assert kept["parameter_bytes_per_chip"] < 4 * 60e6 / 8


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("jax_cuda12_plugin"), reason="needs requirements-compile.txt")
@pytest.mark.parametrize("head", [("domino",), ("markov", "--config.drafter.markov.head_type=rnn")])
def test_a_bfloat16_step_gathers_two_bytes_a_weight_of_its_float32_masters(head):
    name, *choices = head
    small = ("--config.drafter.target_layer_ids=(0,)", f"--config.drafter.head={name}", "--config.mesh.fsdp=-1")
    config = flags(f"--config.target.path={GOLDEN / 'tied_shift' / 'target'}", *small, *choices).config
    mesh = sharding.make_mesh(1, 8, 1, list(topologies.devices_of("h100:8")))
    target = Qwen3(dry_run.shapes_of(config.target.path), np.dtype("bfloat16"))
    drafter = new_drafter(builders.drafter_config_of(config, target.config), np.dtype("bfloat16"))
    with jax.set_mesh(mesh):
        traced, state, _ = dry_run.trace_step(config, target, drafter, mesh)
        text = traced.lower().compile().as_text()
    lines = re.findall(r"= (.*) all-gather(?:-start)?\(", text)
    gathered = {(kind, shape) for line in lines for kind, shape in re.findall(r"(\w+)\[(\d+,\d+)\]", line)}
    masters = {f"{leaf.shape[0]},{leaf.shape[1]}" for leaf in jax.tree.leaves(state.params) if leaf.ndim == 2}
    assert {kind for kind, shape in gathered if shape in masters} == {"bf16"}, gathered
