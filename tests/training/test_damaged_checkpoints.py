"""What may happen to checkpoints: nothing is lost but the step itself, and nothing goes unsaid."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.runtime import remote
from domino_jax.runtime.errors import DataError
from domino_jax.training import manifest
from domino_jax.training.checkpoints import Checkpoints
from tests.helpers.paths import ROOT


def state_of(step):
    return {"w": jax.random.normal(jax.random.key(step), (16, 8)), "step": jnp.int32(step)}


ABSTRACT = jax.eval_shape(lambda: state_of(0))


def save(workdir, steps, keep=10):
    with Checkpoints(workdir, keep=keep) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), {"item": step}, {"config": {}})


def resume(workdir):
    """(the restored checkpoint, the reported lines)."""
    lines = []
    with Checkpoints(workdir, keep=10, report=lines.append) as checkpoints:
        restored = checkpoints.restore_latest(ABSTRACT)
    if restored is not None:
        np.testing.assert_array_equal(restored.state["w"], state_of(restored.step)["w"])
        assert (int(restored.state["step"]), restored.data_state) == (restored.step, {"item": restored.step})
    return restored, lines


def names(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


# ---------------------------------------------------------------- cut off

DIES = """
import os, pathlib, signal, sys
import jax.numpy as jnp
from domino_jax.training import manifest
from domino_jax.training.checkpoints import Checkpoints

moment, workdir = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if moment == "in orbax":
    pathlib.PosixPath.rename = os.rename = os.replace = die
else:
    manifest.write_whole = die
with Checkpoints(workdir, keep=10) as checkpoints:
    checkpoints.save(5, {"w": jnp.zeros(4)}, {}, {})
"""


@pytest.mark.parametrize(("moment", "before"), [("in orbax", [4]), ("before the manifest is in place", [])])
def test_after_a_save_cut_off_by_kill_9_the_run_continues_and_saves_its_step_again(tmp_path, moment, before):
    save(tmp_path, before)
    ended = subprocess.run([sys.executable, "-c", DIES, moment, str(tmp_path)], cwd=ROOT, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    restored, lines = resume(tmp_path)
    assert (restored.step if restored else None) == (before[-1] if before else None)
    set_aside = moment != "in orbax"
    assert ["manifest.json: missing" in line for line in lines] == [True] * set_aside
    save(tmp_path, [6])  # the next one may have another number
    assert resume(tmp_path)[0].step == 6
    assert names(tmp_path) == [*map(str, before), "6", *(["corrupt"] if set_aside else [])]


def test_what_a_removal_that_was_cut_off_left_is_removed_with_the_next_save(tmp_path):
    save(tmp_path, [4, 5])
    (tmp_path / "checkpoints" / "4" / "manifest.json").unlink()
    restored, lines = resume(tmp_path)
    assert (restored.step, lines) == (5, [])
    save(tmp_path, [6])
    assert names(tmp_path) == ["5", "6"]


# ---------------------------------------------------------------- damaged


def data_file(folder):
    files = [path for path in (folder / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def forget_a_file(folder):
    written = json.loads((folder / "manifest.json").read_text())
    written["files"].popitem()
    (folder / "manifest.json").write_text(json.dumps(written))


UNSIGNED = "manifest.json: does not match its own checksum"
HARM = {
    "one bit flipped": (lambda folder: flip(data_file(folder), 99), "its content changed (SHA-256 differs)"),
    "file cut": (lambda folder: os.truncate(data_file(folder), 3), "its content changed"),
    "item deleted": (lambda folder: shutil.rmtree(folder / "state"), "state/_METADATA: missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: missing"),
    "manifest edited": (forget_a_file, UNSIGNED),
    "another step's": (lambda folder: manifest.write(folder, 5), "manifest.json: is that of step 5"),
}


@pytest.mark.parametrize(("harm", "reason"), HARM.values(), ids=HARM)
def test_a_damaged_checkpoint_is_set_aside_with_one_warning(tmp_path, harm, reason):
    save(tmp_path, [2, 4])
    harm(tmp_path / "checkpoints" / "4")
    left = sorted(path.name for path in (tmp_path / "checkpoints" / "4").rglob("*"))
    restored, lines = resume(tmp_path)
    assert restored.step == 2
    assert len(lines) == 1 and lines[0].startswith("warning: the checkpoint of step 4 is damaged (")
    assert reason in lines[0] and lines[0].endswith("checkpoints/corrupt/4")
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "corrupt" / "4").rglob("*")) == left
    assert names(tmp_path) == ["2", "corrupt"]


def test_the_best_one_is_no_more_the_best_once_it_is_damaged(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step, tau in ((1, 2.0), (2, 3.0)):
            checkpoints.mark_tau(step, tau, "these answers")
            checkpoints.save(step, state_of(step), {"item": step}, {})
    flip(data_file(tmp_path / "checkpoints" / "2"), 99)
    resume(tmp_path)
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        assert checkpoints.best() == (1, 2.0)


def test_several_damaged_ones_are_passed_over_and_a_later_one_of_the_same_step_replaces_the_first(tmp_path):
    save(tmp_path, [2])
    for steps in ([3, 4], [4], [4]):
        save(tmp_path, steps)
        for step in steps:
            flip(data_file(tmp_path / "checkpoints" / str(step)), 99)
        restored, lines = resume(tmp_path)
        assert restored.step == 2 and len(lines) == len(steps)
    assert sorted(os.listdir(tmp_path / "checkpoints" / "corrupt")) == ["3", "4"]


def test_when_all_are_damaged_the_run_stops_with_3_and_does_so_again(tmp_path):
    """Nothing is moved: a second start must not find an empty folder and train from the beginning."""
    save(tmp_path, [2, 4])
    for step in (2, 4):
        flip(data_file(tmp_path / "checkpoints" / str(step)), 99)
    for _ in range(2):
        with pytest.raises(DataError) as refused:
            resume(tmp_path)
        assert refused.value.exit_code == 3
        message = str(refused.value)
        assert len(message.splitlines()) <= 5
        assert "holds no intact checkpoint" in message and "step 4: state/" in message and "--workdir" in message
        assert names(tmp_path) == ["2", "4"]


def test_all_of_200_random_flipped_bits_are_found(tmp_path):
    save(tmp_path, [1])
    folder = tmp_path / "checkpoints" / "1"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) > 8 and folder / "manifest.json" in files
    draw = random.Random(0)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for number in range(200):
            path = files[number % len(files)]
            bit = draw.randrange(8 * path.stat().st_size)
            flip(path, bit)
            message = checkpoints.folders.damage(1)
            assert message is not None and message.startswith(path.relative_to(folder).as_posix()), (path, bit)
            flip(path, bit)
        assert checkpoints.folders.damage(1) is None


OF_RELEASE_0_1 = """{
 "files": {
  "extra": {
   "bytes": 1,
   "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
  }
 },
 "sha256": "a8cc751003cc5a14d9280775b6e5e327c959ae4c80902f8e136d55032b278163",
 "step": 7
}
"""


def test_the_manifest_of_an_earlier_checkpoint_is_read(tmp_path):
    (tmp_path / "extra").write_bytes(b"x")
    (tmp_path / "manifest.json").write_text(OF_RELEASE_0_1)
    assert manifest.damage(tmp_path, 7) is None
    manifest.write(tmp_path, 7)
    assert (tmp_path / "manifest.json").read_text() == OF_RELEASE_0_1


def test_a_store_that_does_not_answer_is_no_damage(bucket, monkeypatch):
    """Else one outage would set a whole checkpoint aside."""
    folder = remote.open_path(f"{bucket}/7")
    (folder / "extra").write_bytes(b"x")
    manifest.write(folder, 7)
    assert manifest.damage(folder, 7) is None

    def silent(*_):
        raise TimeoutError

    monkeypatch.setattr(type(folder), "open", silent)
    with pytest.raises(OSError):
        manifest.damage(folder, 7)


# ---------------------------------------------------------------- disk full


@pytest.fixture
def small_files():
    """This process can write no file above 100 KB, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_at_the_last_save_stops_with_3_and_keeps_the_one_before(tmp_path, small_files):
    too_much = {"w": np.random.default_rng(0).standard_normal(200_000)}
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        checkpoints.save(1, state_of(1), {"item": 1}, {})
        checkpoints.save(2, too_much, {"item": 2}, {})
        with pytest.raises(DataError, match="step 2 could not be written(.|\n)*Make room") as refused:
            checkpoints.wait()
    assert refused.value.exit_code == 3 and len(str(refused.value).splitlines()) <= 5
    assert resume(tmp_path)[0].step == 1


RESHARDS = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from domino_jax.training.checkpoints import Checkpoints

def placed(shape, rows, columns):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("fsdp", "tensor"))
    shardings = {"w": NamedSharding(mesh, P(rows, columns)), "step": NamedSharding(mesh, P())}
    dtypes = {"w": ((16, 8), "float32"), "step": ((), "int32")}
    return {name: jax.ShapeDtypeStruct(*dtypes[name], sharding=shardings[name]) for name in dtypes}

assert jax.device_count() == 4
with Checkpoints(sys.argv[1], keep=10) as checkpoints:
    for step, target in ((2, placed((4, 1), "fsdp", None)), (3, placed((2, 2), "fsdp", "tensor"))):
        restored = checkpoints.restore_latest(target)
        assert restored.step == step - 1
        assert restored.state["w"].sharding == target["w"].sharding
        assert len(restored.state["w"].addressable_shards) == 4
        checkpoints.save(step, restored.state, {"item": step}, {})
"""


def test_what_is_restored_on_another_mesh_is_bit_equal(tmp_path):
    """1 device, to fsdp 4, to fsdp 2 x tensor 2, to 1 device again."""
    save(tmp_path, [1])
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", RESHARDS, str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=120)
    with Checkpoints(tmp_path, keep=10) as checkpoints:
        step, state, data_state, _ = checkpoints.restore_latest(ABSTRACT)
    assert (step, data_state) == (3, {"item": 3})
    assert np.asarray(state["w"]).tobytes() == np.asarray(state_of(1)["w"]).tobytes()
    assert int(state["step"]) == 1
