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
from tests.helpers.decode_mesh_run import COMMAND, EVALUATION, MODES, ONE_BATCH, PROMPTS, evaluated
from tests.helpers.decoding_models import in_eight_bits, make_generator, random_models, texts
from tests.helpers.models import GOLDEN, load_golden

pytestmark = pytest.mark.long

# Two key/value heads: over 2 they are split, over 4 they lie whole.
MESHES = {"data": [4, 1], "both": [2, 4], "int8": [2, 4, False, True], "tied": [2, 2, True]}
MESHES["sparse"] = [2, 4, False, True, True]  # experts in int8, two on a device
FAST = ("tied",)
# Meshes of training steps (data, fsdp, tensor) with the head of the drafter that is evaluated.
EVALUATED = [((2, 2, 2), "domino"), ((1, 8, 1), "eagle3")]
PAIR, NEW = "tied_shift", 24


def started(meshes: dict, devices: int, environment: dict[str, str]) -> subprocess.Popen:
    own = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.helpers.decode_mesh_run", json.dumps(meshes)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | own | environment, **streams)


def read(process: subprocess.Popen) -> dict:
    out, error = process.communicate(timeout=900)
    assert process.returncode == 0, error[-2000:]
    return json.loads(out.splitlines()[-1])


def arguments(folder: pathlib.Path) -> list[str]:
    """Two golden prompts of one bucket, over two devices; the devices are in use already."""
    rows = [{"id": f"p{index}", "token_ids": case["prompt"]} for index, case in enumerate(golden_cases())]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "config": GOLDEN.parents[1] / "configs" / "tiny.py",
        "config.target.path": GOLDEN / PAIR / "target",
        "config.drafter.path": GOLDEN / PAIR / "drafter",
        "config.decode.modes": str(MODES).replace(" ", ""),
        "config.decode.max_new_tokens": NEW,
        "config.decode.cache_length": 128,
        "config.decode.batch_size": 2,
        "config.decode.mesh.tensor": 2,
        "config.decode.num_drafts": 2,
        "config.decode.tree.depth": 3,
        "prompts": folder / "prompts.jsonl",
        "output": folder / "out",
        "distributed": "off",
    }
    return [f"--{key}={value}" for key, value in values.items()]


def golden_cases() -> list[dict]:
    return [load_golden(PAIR).figures["generate"][place] for place in (1, 3)]


@functools.lru_cache
def measured() -> dict:
    """What decode_mesh_run.py prints of the fast meshes."""
    return read(started({name: MESHES[name] for name in FAST}, 4, {}))


@functools.lru_cache
def measured_slowly() -> dict:
    """The outputs of the other processes, and the report and rows that the command wrote."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        others = {name: sizes for name, sizes in MESHES.items() if name not in FAST}
        found = read(started(others | {COMMAND: arguments(folder)}, 8, {}))
        found[COMMAND]["report"] = json.loads((folder / "out" / "report.json").read_text())
        lines = (folder / "out" / "generations.jsonl").read_text().splitlines()
        found[COMMAND]["rows"] = list(map(json.loads, lines))
    return found


@functools.lru_cache
def plain_texts(tied: bool, int8: bool, sparse: bool) -> list[list[int]]:
    models = random_models(tied=tied, sparse=sparse)
    models = in_eight_bits(models, "target") if int8 else models
    made = make_generator(models, batch_size=8, sampling=SamplingParams(1.0))
    return texts(made.generate(PROMPTS, "autoregressive"))


def on_one_device(tied: bool, name: str, int8: bool = False, sparse: bool = False) -> list[list[int]]:
    """The texts that go under this name (decode_mesh_run.py)."""
    return plain_texts(tied, int8, sparse)[: 8 if name in ONE_BATCH else None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAST)
def test_texts_on_a_mesh_are_those_of_one_device(name, mode):
    assert measured()[name][mode] == on_one_device(name == "tied", mode)


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("name", [name for name in MESHES if name not in FAST])
def test_texts_on_other_meshes_are_those_of_one_device(name):
    assert {mode: measured_slowly()[name][mode] for mode in MODES} == {
        mode: on_one_device(False, mode, name in ("int8", "sparse"), name == "sparse") for mode in MODES
    }


def test_weights_are_split_over_tensor_the_cache_over_both_axes_and_the_head_is_whole():
    found = measured()["tied"]
    assert found["split"] > 10 and (found["cache"], found["head_split"]) == (1 / 4, 0)
    assert found["sizes"] == [16, 32]  # the caches have grown


@pytest.mark.slow
def test_nothing_is_split_over_data_and_a_cache_whose_heads_do_not_divide_is_split_over_data_alone():
    found = measured_slowly()
    assert found["data"]["split"] == 0 and found["both"]["split"] > 10
    assert {name: found[name]["cache"] for name in ("data", "both")} == {"data": 1 / 4, "both": 1 / 2}
    assert {found[name]["head_split"] for name in ("data", "both")} == {0}


@pytest.mark.parametrize("name", FAST)
def test_few_candidates_change_no_text_on_a_mesh(name):
    assert measured()[name]["candidates"] == on_one_device(name == "tied", "candidates")


@pytest.mark.slow
def test_the_command_on_two_devices_gives_the_texts_of_one():
    """Those of golden.json: without a mesh the command gives them too (test_decode_command.py)."""
    found = measured_slowly()[COMMAND]
    for mode in MODES[1:]:
        identical = found["report"]["identical_outputs"][mode]
        assert (identical["same"], identical["of"], identical["violations"]) == (2, 2, 0)
        assert found["report"]["modes"][mode]["tau_pooled"] > 1
    assert found["report"]["round_widths"] == {"domino": 3, "tree": 4}
    assert [len(found["report"]["modes"][mode]["accept_rate_by_position"]) for mode in MODES[1:]] == [2, 3]
    texts_of = {(row["id"], row["mode"]): row["token_ids"] for row in found["rows"]}
    assert len(texts_of) == 2 * len(MODES)
    for index, case in enumerate(golden_cases()):
        for mode in MODES:
            assert texts_of[f"p{index}", mode] == case["output"][:NEW]


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
        assert {mode: found["both"][mode] for mode in MODES} == {mode: on_one_device(False, mode) for mode in MODES}
        assert found[EVALUATION] == [evaluated_on_one_device("domino")]
