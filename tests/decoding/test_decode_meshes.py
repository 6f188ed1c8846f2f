"""Decoding over data × tensor gives the texts of one device, on fake devices and on those of several processes."""

import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import pytest

from domino_jax.method.settings import SamplingParams
from tests.commands.test_decode_command import NEW, arguments, write_prompts
from tests.helpers import train_runs
from tests.helpers.decode_mesh_run import COMMAND, EVALUATION, MODES, ONE_BATCH, PROMPTS, evaluated
from tests.helpers.decoding_models import in_eight_bits, make_generator, random_models, texts

pytestmark = pytest.mark.long

# Two key/value heads: over 2 they are split, over 4 they lie whole.
MESHES = {"data": [4, 1], "both": [2, 4], "int8": [2, 4, False, True], "tied": [2, 2, True]}
MESHES["sparse"] = [2, 4, False, True, True]  # experts in int8, two on a device
FAST = "tied"
# Meshes of training steps (data, fsdp, tensor) with the head of the drafter that is evaluated.
EVALUATED = [((2, 2, 2), "domino"), ((1, 8, 1), "eagle3")]
GOLDEN = {place: train_runs.CASES[place] for place in (1, 3)}


def started(meshes: dict, devices: int, environment: dict[str, str]) -> subprocess.Popen:
    own = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.helpers.decode_mesh_run", json.dumps(meshes)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | own | environment, **streams)


def read(process: subprocess.Popen) -> dict:
    out, error = process.communicate(timeout=900)
    assert process.returncode == 0, error[-2000:]
    return json.loads(out.splitlines()[-1])


def command_of(folder: pathlib.Path) -> list[str]:
    """Two golden prompts of one bucket, over two devices; the devices are in use already."""
    prompts = write_prompts(folder, [{"id": str(place), "token_ids": case["prompt"]} for place, case in GOLDEN.items()])
    changes = {"modes": str(MODES).replace(" ", ""), "mesh__tensor": 2, "num_drafts": 2, "tree__depth": 3}
    changes = {f"config__decode__{name}": value for name, value in changes.items()}
    return arguments(prompts, folder / "out", **changes, distributed="off")


@functools.lru_cache
def measured() -> dict:
    """What decode_mesh_run.py prints of the fast mesh."""
    return read(started({FAST: MESHES[FAST]}, 4, {}))[FAST]


@functools.lru_cache
def measured_slowly() -> dict:
    """The outputs of the other meshes, and the report and rows that the command wrote."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        others = {name: sizes for name, sizes in MESHES.items() if name != FAST}
        found = read(started({**others, COMMAND: command_of(folder)}, 8, {}))
        found[COMMAND]["report"] = json.loads((folder / "out" / "report.json").read_text())
        lines = (folder / "out" / "generations.jsonl").read_text().splitlines()
        found[COMMAND]["rows"] = list(map(json.loads, lines))
    return found


@functools.lru_cache
def plain_texts(tied: bool = False, int8: bool = False, sparse: bool = False) -> list[list[int]]:
    models = random_models(tied=tied, sparse=sparse)
    models = in_eight_bits(models, "target") if int8 else models
    made = make_generator(models, batch_size=8, sampling=SamplingParams(1.0))
    return texts(made.generate(PROMPTS, "autoregressive"))


def on_one_device(*names: str, **choices: bool) -> dict[str, list[list[int]]]:
    """The texts that go under these names (decode_mesh_run.py)."""
    return {name: plain_texts(**choices)[: 8 if name in ONE_BATCH else None] for name in names}


def test_on_a_mesh_texts_are_those_of_one_device_weights_and_caches_are_split_and_the_head_is_whole():
    """Weights over tensor, the cache over both axes."""
    found, names = measured(), (*MODES, "candidates")
    assert {name: found[name] for name in names} == on_one_device(*names, tied=True)
    assert found["split"] > 10 and (found["cache"], found["head_split"]) == (1 / 4, 0)
    assert found["sizes"] == [16, 32]  # the caches have grown


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("name", [name for name in MESHES if name != FAST])
def test_texts_on_other_meshes_are_those_of_one_device(name):
    choices = {"int8": name in ("int8", "sparse"), "sparse": name == "sparse"}
    assert {mode: measured_slowly()[name][mode] for mode in MODES} == on_one_device(*MODES, **choices)


@pytest.mark.slow
def test_nothing_is_split_over_data_and_a_cache_whose_heads_do_not_divide_is_split_over_data_alone():
    found = measured_slowly()
    assert found["data"]["split"] == 0 and found["both"]["split"] > 10
    assert [(found[name]["cache"], found[name]["head_split"]) for name in ("data", "both")] == [(1 / 4, 0), (1 / 2, 0)]


@pytest.mark.slow
def test_the_command_on_two_devices_gives_the_texts_of_one():
    """Those of golden.json: without a mesh the command gives them too (test_decode_command.py)."""
    found = measured_slowly()[COMMAND]
    report = found["report"]
    assert all(report["identical_outputs"][mode]["same"] == 2 for mode in MODES[1:])
    assert report["round_widths"] == {"domino": 3, "tree": 4}
    texts_of = {(row["id"], row["mode"]): row["token_ids"] for row in found["rows"]}
    assert texts_of == {(str(place), mode): case["output"][:NEW] for place, case in GOLDEN.items() for mode in MODES}


@functools.lru_cache
def evaluated_on_one_device(head: str) -> dict:
    found = evaluated(random_models(head=head))
    return {name: pytest.approx(value, rel=1e-4) for name, value in found.items()}


@functools.lru_cache
def evaluated_on_meshes() -> list[dict]:
    return read(started({EVALUATION: [[*sizes, head] for sizes, head in EVALUATED]}, 8, {}))[EVALUATION]


@pytest.mark.parametrize("trained, head", EVALUATED)
def test_an_evaluation_while_training_on_a_mesh_is_that_of_one_device(trained, head):
    assert evaluated_on_meshes()[EVALUATED.index((trained, head))] == evaluated_on_one_device(head)


def in_two_processes(meshes: dict) -> list[dict]:
    """What each of two processes with two devices prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [started(meshes, 2, shared | {"JAX_PROCESS_ID": str(number)}) for number in range(2)]
    return [read(process) for process in processes]


@pytest.mark.slow
def test_texts_and_evaluations_of_two_processes_are_those_of_one_device():
    for found in in_two_processes({"both": [2, 2], EVALUATION: [[1, 4, 1, "domino"]]}):
        assert {mode: found["both"][mode] for mode in MODES} == on_one_device(*MODES)
        assert found[EVALUATION] == [evaluated_on_one_device("domino")]
