"""export.py: a training checkpoint becomes the public folder, byte for byte the parameters in bfloat16."""

import functools
import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from etils import epath

from domino_jax import export
from domino_jax.method.state import TrainState
from domino_jax.runtime import remote
from domino_jax.training.checkpoints import Checkpoints
from domino_jax.weights.drafter import load_drafter
from domino_jax.weights.loading import load_target
from tests.helpers.commands import run
from tests.helpers.report_runs import RECIPE
from tests.helpers.train_runs import GOLDEN

FILES = ["README.md", "config.json", "model.safetensors"]
DATA = {"rows": 12_345, "tokens": 678_901, "fingerprint": "0123456789abcdef0123"}
REPORT = {
    **{"prompts": {"count": 16}, "drafter": {"block_size": 4}, "round_widths": {"domino": 3}, "verify_width": 3},
    **{"dtype": "float32", "device": "1 × cpu"},
    "modes": {"domino": {"tau_pooled": 3.25, "tau_per_prompt": 3.5, "speedup": 1.75, "identical": None}},
}


@pytest.fixture(scope="module")
def drafter():
    target = load_target(str(GOLDEN / "target"), "float32")
    return load_drafter(GOLDEN / "drafter", target.model.config, np.dtype("float32"))


def scaled(params, factor):
    return jax.tree.map(lambda leaf: leaf * factor, params)


@pytest.fixture(scope="module")
def trained(drafter, tmp_path_factory):
    """A workdir as train leaves it: the golden drafter at step 7, twice as large at step 9, averages three times so."""
    workdir = tmp_path_factory.mktemp("workdir")
    config, params = drafter
    optimizer = optax.adamw(1e-3)
    (workdir / "drafter_config.json").write_text(json.dumps(config.to_dict()))
    (workdir / "config.json").write_text(json.dumps(RECIPE))
    with Checkpoints(workdir, keep=3) as checkpoints:
        for step, factor in ((7, 1.0), (9, 2.0)):
            now, zero = scaled(params, factor), np.int32(0)
            state = TrainState(np.int32(step), now, optimizer.init(now), scaled(params, 3.0 * factor), zero, zero)
            checkpoints.save(step, state, {}, {"config": RECIPE})
    return workdir


@pytest.fixture
def workdir(trained, tmp_path):
    return pathlib.Path(shutil.copytree(trained, tmp_path / "workdir"))


def start(capsys, workdir, output, *more):
    return run("export", f"--workdir={workdir}", f"--output={output}", *more), "".join(capsys.readouterr())


def exported(folder):
    target = load_target(str(GOLDEN / "target"), "float32")
    return load_drafter(folder, target.model.config, ml_dtypes.bfloat16)


def assert_same(found, params):
    """The tensors are the parameters in bfloat16, bit for bit."""
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(ml_dtypes.bfloat16), params)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, expected)


def test_the_newest_checkpoint_is_exported_in_bfloat16_in_the_public_layout(drafter, workdir, capsys):
    output = workdir / "out"
    config, params = drafter
    code, message = start(capsys, workdir, output)
    assert code == 0 and "step 9" in message
    found_config, found = exported(output)
    assert found_config.to_dict() == config.to_dict()
    assert_same(found, scaled(params, 2.0))
    assert sorted(file.name for file in output.iterdir()) == FILES
    assert json.loads((output / "config.json").read_text())["dflash_config"]["projector_type"] == "domino"
    # The checkpoints are as they were.
    assert sorted(folder.name for folder in (workdir / "checkpoints").iterdir()) == ["7", "9"]


def test_the_best_checkpoint_by_tau_goes_before_the_newest(drafter, workdir, capsys):
    with Checkpoints(workdir, keep=3) as checkpoints:
        checkpoints.mark_tau(7, 4.5, "these answers")
        checkpoints.mark_tau(9, 4.25, "these answers")
    code, message = start(capsys, workdir, workdir / "out")
    assert code == 0 and "step 7, the best of the run with a τ of 4.50" in message
    assert_same(exported(workdir / "out")[1], drafter[1])
    assert "τ 4.50 at step 7" in (workdir / "out" / "README.md").read_text()


def test_the_average_is_exported_when_the_run_keeps_one(drafter, workdir, capsys):
    recipe = {**RECIPE, "train": {**RECIPE["train"], "ema_decay": 0.99}}
    (workdir / "config.json").write_text(json.dumps(recipe))
    assert start(capsys, workdir, workdir / "out")[0] == 0
    assert_same(exported(workdir / "out")[1], scaled(drafter[1], 6.0))


def test_a_damaged_checkpoint_is_left_out_with_a_warning(drafter, workdir, capsys):
    file = max((workdir / "checkpoints" / "9" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with Checkpoints(workdir) as checkpoints:
        checkpoints.mark_tau(9, 4.5, "these answers")  # the best and the newest, read once
    code, message = start(capsys, workdir, workdir / "out")
    assert code == 0 and message.count("step 9 is damaged and skipped") == 1 and "the drafter of step 7" in message
    assert_same(exported(workdir / "out")[1], drafter[1])
    assert (workdir / "checkpoints" / "9").is_dir()  # read, not moved


def test_the_card_of_a_run_names_rows_and_the_tau_of_the_step_that_was_decoded(workdir, capsys):
    recipe = {**RECIPE, "train": {**RECIPE["train"], "steps": 9}}
    (workdir / "config.json").write_text(json.dumps(recipe))
    (workdir / "preflight.json").write_text(json.dumps({"data": DATA}))
    (workdir / "report").mkdir()
    (workdir / "report" / "report.json").write_text(json.dumps(REPORT))
    for decoded, shown in ((9, True), (7, False)):
        (workdir / "finished.json").write_text(json.dumps({"step": 9, "exported_step": decoded}))
        assert start(capsys, workdir, workdir / "out")[0] == 0
        card = (workdir / "out" / "README.md").read_text()
        assert "12,345 rows, 678,901 tokens, fingerprint 0123456789abcdef\n" in card
        assert ("| τ pooled | 3.25 |\n| τ per prompt | 3.50 |\n| speed-up | 1.75" in card) == shown
        assert ("block size 4: a round can emit at most 3 tokens." in card) == shown


# ------------------------------------------------------------------------------------------------------ the folder


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_interrupted_export_leaves_the_folder_as_it_was(drafter, tmp_path, monkeypatch):
    config, params = drafter
    export.write_export(tmp_path / "out", config, params, RECIPE, 1)
    before = contents(tmp_path / "out")
    save = export.save_drafter

    def dies(*arguments, **named):
        save(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "save_drafter", dies)
    for folder in ("out", "new"):
        with pytest.raises(KeyboardInterrupt):
            export.write_export(tmp_path / folder, config, scaled(params, 2.0), RECIPE, 2)
    assert contents(tmp_path / "out") == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_export_left_is_removed_and_a_second_one_replaces_the_first(drafter, tmp_path):
    config, params = drafter
    for left in (".out.0123456789ab.tmp", ".out.previous.tmp"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".out.notes.tmp").mkdir()
    export.write_export(tmp_path / "out", config, params, RECIPE, 1)
    (tmp_path / "out" / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier one")
    export.write_export(tmp_path / "out", config, scaled(params, 2.0), RECIPE, 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".out.notes.tmp", "out"]
    assert sorted(entry.name for entry in (tmp_path / "out").iterdir()) == FILES
    assert_same(exported(tmp_path / "out")[1], scaled(params, 2.0))


def test_an_export_into_a_bucket_that_is_cut_off_is_no_drafter_and_the_next_one_is_whole(drafter, bucket, monkeypatch):
    folder = remote.open_path(f"{bucket}/out")
    export.write_export(folder, *drafter, RECIPE, 1)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier one")
    local, copied = type(epath.Path(".")), []

    def cut(path, *_, copy=local.copy, **named):
        if len(copied) == 2:
            raise KeyboardInterrupt
        copied.append(path.name)
        return copy(path, *_, **named)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(local, "copy", cut)
        export.write_export(folder, *drafter, RECIPE, 2)
    assert sorted(copied) == sorted(path.name for path in folder.iterdir()) == ["README.md", "model.safetensors"]
    export.write_export(folder, *drafter, RECIPE, 2)
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_what_somebody_adds_to_a_runs_export_stays_there(drafter, tmp_path):
    folder = tmp_path / "export"
    export.write_export(folder, *drafter, RECIPE, 1)
    (folder / "LICENSE").write_text("mine")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "upload").write_text("half")
    export.write_export(folder, *drafter, RECIPE, 2)
    assert (folder / "LICENSE").read_text() == "mine" and (folder / ".cache" / "upload").read_text() == "half"
    assert sorted(entry.name for entry in folder.iterdir()) == sorted([*FILES, "LICENSE", ".cache"])


@pytest.mark.parametrize("other", ["workdir", "target"])
def test_a_run_or_a_target_is_never_replaced_by_an_export(workdir, tmp_path, capsys, other):
    output = workdir
    if other == "target":
        output = pathlib.Path(shutil.copytree(GOLDEN / "target", tmp_path / "target"))
    before = contents(output)
    code, printed = start(capsys, workdir, output)
    assert code == 2 and f"--output={output} has a config.json that is not a drafter's" in printed
    assert contents(output) == before


def widen(workdir):
    path = workdir / "drafter_config.json"
    raw = json.loads(path.read_text())
    raw["dflash_config"]["emb_dim"] += 1
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (lambda workdir: shutil.rmtree(workdir), 2, "is not a folder"),
        (lambda workdir: (workdir / "drafter_config.json").unlink(), 3, "is not the workdir of a training run"),
        (lambda workdir: (workdir / "config.json").write_text("{torn"), 3, "config.json is not valid JSON"),
        (lambda workdir: shutil.rmtree(workdir / "checkpoints"), 3, "holds no intact checkpoint"),
        (
            lambda workdir: [shutil.rmtree(state) for state in workdir.glob("checkpoints/*/state")],
            3,
            "newest of 2, step 9: state/",
        ),
        (widen, 3, "checkpoints/9 does not hold"),
    ],
    ids=["no workdir", "no drafter config", "torn recipe", "no checkpoints", "no state", "other shapes"],
)
def test_a_workdir_that_cannot_be_exported_is_reported(workdir, capsys, damage, code, message):
    damage(workdir)
    found, printed = start(capsys, workdir, workdir.parent / "out")
    assert (found, "Traceback" in printed) == (code, False)
    assert message in printed and len(printed.strip().splitlines()) <= 5
    assert not (workdir.parent / "out").exists()
