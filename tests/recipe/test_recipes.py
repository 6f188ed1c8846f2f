"""configs/: every recipe loads, passes the checks, has the same keys, and the real ones carry the paper's values."""

import json
import sys

import pytest

from domino_jax.method import optimizer
from domino_jax.recipe import loading, rules
from domino_jax.recipe.builders import drafter_config_of
from domino_jax.recipe.open_keys import shifts_labels
from domino_jax.runtime.differences import differences
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.keys import walk
from domino_jax.weights.target import read_target_config
from tests.helpers.paths import ROOT
from tests.helpers.recipes import recipe

SIZES = {
    # size: hub id, hidden, intermediate, layers, heads, tied
    "0_6b": ("Qwen/Qwen3-0.6B", 1024, 3072, 28, 16, True),
    "1_7b": ("Qwen/Qwen3-1.7B", 2048, 6144, 28, 16, True),
    "4b": ("Qwen/Qwen3-4B", 2560, 9728, 36, 32, True),
    "8b": ("Qwen/Qwen3-8B", 4096, 12288, 36, 32, False),
    "14b": ("Qwen/Qwen3-14B", 5120, 17408, 40, 40, False),
    "32b": ("Qwen/Qwen3-32B", 5120, 25600, 64, 64, False),
}


def load(name):
    return loading.load_recipe(str(ROOT / "configs" / f"{name}.py"))


NAMES = ["tiny", "smollm2_135m", *(f"qwen3_{size}" for size in SIZES)]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads_passes_the_checks_and_carries_its_command(name):
    config = load(name)
    config.data.train = "rows.jsonl"
    rules.check(config, "train")
    text = (ROOT / "configs" / f"{name}.py").read_text()
    assert f"python -m domino_jax.train --config=configs/{name}.py" in text
    assert "To expect:" in text


def test_all_recipes_have_the_keys_of_the_base():
    assert len({tuple(key for key, _, _ in walk(load(name))) for name in NAMES}) == 1


@pytest.mark.parametrize("size", SIZES)
def test_real_recipes_differ_only_in_their_target(size):
    difference = differences(loading.resolved(load("qwen3_8b")), loading.resolved(load(f"qwen3_{size}")))
    assert set(difference) <= {"target.path"}
    assert load(f"qwen3_{size}").target.path == SIZES[size][0]


def test_the_papers_values_are_in_the_real_recipes():
    config = load("qwen3_8b")
    drafter, train = config.drafter, config.train
    assert (drafter.num_layers, drafter.block_size) == (5, 16)
    assert drafter.domino.to_dict() == {"emb_dim": 256, "gru_hidden_dim": 1024}
    target = read_target_config(str(ROOT / "assets" / "qwen3_configs" / "8b"))
    assert drafter_config_of(config, target).pure_draft_prefix_len == 1
    assert (shifts_labels(drafter), drafter.target_layer_ids) == (True, None)
    assert (train.num_anchors, train.gamma, train.learning_rate, train.warmup_ratio) == (256, 7.0, 6e-4, 0.04)
    assert (train.lambda_start, train.lambda_decay_ratio, config.data.max_length) == (1.0, 1.0, 3072)
    assert (optimizer.B1, optimizer.B2, optimizer.CLIP_NORM) == (0.9, 0.999, 1.0)


def test_a_drafter_has_its_targets_hidden_units_unless_the_recipe_gives_others():
    config, target = load("tiny"), read_target_config(load("tiny").target.path)
    assert drafter_config_of(config, target).intermediate_size == target.intermediate_size
    config.drafter.intermediate_size = 96
    narrow = drafter_config_of(config, target)
    assert (narrow.intermediate_size, narrow.hidden_size) == (96, target.hidden_size)


def test_the_layers_that_slide_are_exported_in_the_public_keys():
    config = load("qwen3_8b")
    config.drafter.sliding_window = 512
    target = read_target_config(str(ROOT / "assets" / "qwen3_configs" / "8b"))
    stored = drafter_config_of(config, target).to_dict()
    assert stored["layer_types"] == ["sliding_attention"] * 5
    assert (stored["sliding_window"], stored["use_sliding_window"]) == (512, True)


def test_a_recipe_that_sets_a_key_the_base_does_not_have_is_refused_by_its_line(tmp_path):
    lines = "from configs import qwen3\ndef get_config():\n    config = qwen3.get_config('x')\n    config.{}\n"
    (tmp_path / "old.py").write_text(lines.format("drafter.emb_dim = 64"))
    with pytest.raises(DominoError, match="old.py:4: .*emb_dim.* is no key of this section, which has block_size, "):
        loading.load_recipe(str(tmp_path / "old.py"))


def test_resolved_is_strict_json_and_survives_a_round_trip():
    config = recipe()
    config.train.gamma = float("inf")
    plain = loading.resolved(config)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["train"]["gamma"] == "inf"
    assert plain["decode"]["modes"] == ["autoregressive", "backbone", "domino"]
    assert plain["drafter"]["mask_token_id"] is None


def test_a_recipes_configs_are_its_neighbours_and_ours_whatever_the_current_folder_has(tmp_path, monkeypatch):
    other, mine = tmp_path / "other" / "configs", tmp_path / "mine" / "configs"
    for folder in (other, mine):
        folder.mkdir(parents=True)
    (other / "__init__.py").write_text("raise RuntimeError('of another project')\n")
    (other / "qwen3.py").write_text("raise RuntimeError('of another project')\n")
    (mine / "base.py").write_text("import configs.qwen3\ndef small():\n    return configs.qwen3.get_config('small')\n")
    (mine / "run.py").write_text("from configs import base\ndef get_config():\n    return base.small()\n")
    monkeypatch.chdir(other.parent)
    monkeypatch.syspath_prepend(str(other.parent))
    already, path = sys.modules["configs"], list(sys.path)
    assert loading.load_recipe("qwen3_8b").target.path == "Qwen/Qwen3-8B"
    assert loading.load_recipe(str(mine / "run.py")).target.path == "small"
    assert sys.modules["configs"] is already and sys.path == path


def test_a_name_alone_is_a_recipe_of_this_project(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "resnet.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DominoError, match="resnet: there is no such file"):
        loading.load_recipe("resnet")
