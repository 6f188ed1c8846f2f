"""export.py: a training checkpoint becomes the public folder, byte for byte what the parameters say in bfloat16."""

import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

from domino_jax import cli, export
from domino_jax.checkpoint import Checkpoints
from domino_jax.drafter.convert import load_drafter
from domino_jax.loading import load_target
from domino_jax.training.state import TrainState

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "tied_shift"
RECIPE = {
    "seed": 42,
    "target": {"path": "some/target"},
    "data": {"train": "rows.jsonl", "regenerate": True, "max_length": 320},
    "train": {"steps": 600, "batch_size": 8, "num_anchors": 32, "optimizer": "adamw", "learning_rate": 6e-4},
}
REPORT = {
    "prompts": {"count": 16},
    "dtype": "float32",
    "device": "1 × cpu",
    "modes": {
        "autoregressive": {"tau_pooled": None, "tau_per_prompt": None, "speedup": 1.0},
        "domino": {"tau_pooled": 3.25, "tau_per_prompt": 3.5, "speedup": 1.75},
    },
}


@pytest.fixture(scope="module")
def drafter():
    target = load_target(str(GOLDEN / "target"), "float32")
    return load_drafter(GOLDEN / "drafter", target.model.config, np.dtype("float32"))


@pytest.fixture(scope="module")
def trained(drafter, tmp_path_factory):
    """A workdir as train leaves it: the golden drafter at step 7, twice as large at step 9."""
    workdir = tmp_path_factory.mktemp("workdir")
    config, params = drafter
    optimizer = optax.adamw(1e-3)
    (workdir / "drafter_config.json").write_text(json.dumps(config.to_dict()))
    (workdir / "config.json").write_text(json.dumps(RECIPE))
    with Checkpoints(workdir, keep=3) as checkpoints:
        for step, factor in ((7, 1.0), (9, 2.0)):
            scaled = jax.tree.map(lambda leaf, factor=factor: leaf * factor, params)
            state = TrainState(np.int32(step), scaled, optimizer.init(scaled))
            checkpoints.save(step, state, {}, {"config": RECIPE})
    return workdir


@pytest.fixture
def workdir(trained, tmp_path):
    return pathlib.Path(shutil.copytree(trained, tmp_path / "workdir"))


def start(capsys, workdir, output):
    with pytest.raises(SystemExit) as left:
        cli.run(export.main, ("workdir", "output"), (), ["export", f"--workdir={workdir}", f"--output={output}"])
    said = capsys.readouterr()
    return left.value.code, said.out + said.err


def test_the_newest_checkpoint_is_exported_in_bfloat16_in_the_public_layout(drafter, workdir, capsys):
    output = workdir / "out"
    code, said = start(capsys, workdir, output)
    assert code == 0 and "step 9" in said
    config, params = drafter
    target = load_target(str(GOLDEN / "target"), "float32")
    found_config, found = load_drafter(output, target.model.config, ml_dtypes.bfloat16)
    assert found_config.to_dict() == config.to_dict()
    jax.tree.map(
        lambda one, two: np.testing.assert_array_equal(
            np.asarray(one), (np.asarray(two) * 2).astype(ml_dtypes.bfloat16), strict=True
        ),
        found,
        params,
    )
    assert sorted(file.name for file in output.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert json.loads((output / "config.json").read_text())["dflash_config"]["projector_type"] == "domino"
    # The checkpoints are as they were.
    assert sorted(folder.name for folder in (workdir / "checkpoints").iterdir()) == ["7", "9"]


def test_the_card_tells_recipe_data_steps_versions_and_tau_once_measured(drafter):
    config, _ = drafter
    card = export.model_card(config, 1_234, RECIPE, 9, None)
    for said in (
        "# Domino drafter for some/target",
        "weights: 1,234, bfloat16",
        "9 of 600, 8 rows each",
        "rows.jsonl (answers reg",
    ):
        assert said in card
    assert f"jax {jax.__version__}" in card and "τ" not in card
    measured = export.model_card(config, 1_234, RECIPE, 9, REPORT)
    assert "- domino: τ 3.25 pooled, 3.50 per prompt, 1.75 × the target alone" in measured
    assert "autoregressive" not in measured


def test_the_card_names_no_folder_of_the_machine(drafter):
    recipe = {**RECIPE, "target": {"path": "/data/models/qwen"}, "data": {**RECIPE["data"], "train": "~/rows.jsonl"}}
    card = export.model_card(drafter[0], 1_234, recipe, 9, None)
    assert "# Domino drafter for qwen\n" in card and "/data" not in card and "~" not in card


def test_only_the_parameters_are_read_from_a_checkpoint(drafter, workdir):
    config, params = drafter
    step, found = export.restore_params(workdir, config)
    assert step == 9
    assert jax.tree.structure(found) == jax.tree.structure(params)


@pytest.mark.parametrize(
    ("damage", "code", "said"),
    [
        (lambda workdir: shutil.rmtree(workdir), 2, "is no folder"),
        (lambda workdir: (workdir / "drafter_config.json").unlink(), 3, "is not the workdir of a training run"),
        (lambda workdir: (workdir / "config.json").write_text("{torn"), 3, "config.json is no JSON"),
        (lambda workdir: shutil.rmtree(workdir / "checkpoints"), 3, "holds no checkpoints"),
        (lambda workdir: shutil.rmtree(workdir / "checkpoints" / "9" / "state"), 3, "checkpoints/9 does not hold"),
        (lambda workdir: change_width(workdir), 3, "checkpoints/9 does not hold"),
    ],
    ids=["no workdir", "no drafter config", "torn recipe", "no checkpoints", "no state", "other shapes"],
)
def test_a_workdir_that_cannot_be_exported_is_told(workdir, capsys, damage, code, said):
    damage(workdir)
    found, told = start(capsys, workdir, workdir.parent / "out")
    assert (found, "Traceback" in told) == (code, False)
    assert said in told and len(told.strip().splitlines()) <= 5
    assert not (workdir.parent / "out").exists()


def change_width(workdir):
    path = workdir / "drafter_config.json"
    raw = json.loads(path.read_text())
    raw["dflash_config"]["emb_dim"] += 1
    path.write_text(json.dumps(raw))
