"""What tune measured: stored per device beside the drafter, and used where the recipe or the caller leaves it open."""

import dataclasses
import json
import shutil

import pytest

import domino_jax
from configs import qwen3
from domino_jax.decoding.stored_tuning import check_writable, file_name, store_tuning, tuned
from domino_jax.method.settings import DecodeSettings, DraftSettings, SamplingParams, TreeSettings
from domino_jax.recipe.values import decode_settings
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.paths import ASSETS

WIDTHS = ((1, 5), (2, 0))
TREE = TreeSettings(nodes=20, lanes=8, candidates=32, beta=-0.2, depth=4)


def drafting_of(folder, **changes) -> DraftSettings:
    config = qwen3.get_config("none")
    config.decode.update({"modes": ("draft", "tree"), **changes})
    return tuned(decode_settings(config.decode, "domino"), folder and str(folder)).drafting


def test_decode_takes_the_tuning_except_for_what_the_recipe_sets(tmp_path):
    store_tuning(tmp_path, ((1, 3),), None)
    store_tuning(tmp_path, WIDTHS, TREE)
    assert json.loads((tmp_path / file_name()).read_text())["drafts"] == {"1": 5, "2": 0}
    assert (drafting_of(tmp_path).widths, drafting_of(tmp_path).tree) == (WIDTHS, TREE)
    assert drafting_of(tmp_path, num_drafts=2).widths == ()
    assert drafting_of(tmp_path, tree={"nodes": 16}).tree == TreeSettings(nodes=16)
    assert drafting_of(tmp_path, modes=("draft",)).tree is None
    for ignored in ({"simulate_tau": 2.0}, {"parity": "fixed_shape", "modes": ("draft",)}):
        assert drafting_of(tmp_path, **ignored) == drafting_of(None, **ignored)
    drafting_of("/there/is/nothing", modes=("autoregressive",))  # is not read
    (tmp_path / file_name()).unlink()
    assert drafting_of(tmp_path) == drafting_of(None)


@pytest.mark.parametrize(
    "change",
    [{"drafts": 5}, {"drafts": {}}, {"drafts": {"x": 5}}, {"drafts": {"1": True}}, {"drafts": {"1": -1}}]
    + [{"tree": {"leaves": 3}}, {"tree": {"nodes": "x"}}, {"tree": 5}],
)
def test_a_damaged_file_is_refused_by_its_name(tmp_path, change):
    file = store_tuning(tmp_path, WIDTHS, TREE)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DataError, match=file_name()):
        drafting_of(tmp_path)


def test_a_folder_that_cannot_be_written_is_refused_before_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda folder, mode: False)
    with pytest.raises(DominoError, match="cannot be written"):
        check_writable(tmp_path)


def test_what_a_report_holds_of_the_settings_is_json_under_the_recipes_names():
    config = qwen3.get_config("none")
    config.decode.update({"modes": ("tree",), "temperature": 0.5})
    values = decode_settings(config.decode, "domino").as_json()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["draft_sharpness"], values["temperature"], values["tree"]["nodes"]) == (2.0, 0.5, 64)


def test_the_python_apis_defaults_are_those_of_the_recipe():
    config = qwen3.get_config("none")
    assert decode_settings(config.decode, "domino").change(modes=()) == DecodeSettings()
    config.decode.modes = ("tree",)
    assert decode_settings(config.decode, "domino").drafting.tree == TreeSettings()


def test_other_values_are_set_under_their_own_names():
    settings = DecodeSettings(batch_size=3).change(temperature=0.5, draft_sharpness=1.0, seed=4)
    assert settings.sampling == SamplingParams(0.5) and settings.drafting == DraftSettings(draft_sharpness=1.0)
    assert (settings.batch_size, settings.seed) == (3, 4)
    with pytest.raises(TypeError, match="sharpnes"):
        DecodeSettings().change(sharpnes=2.0)


def test_the_python_api_uses_the_tuning_unless_the_caller_says_otherwise(tmp_path):
    drafter = tmp_path / "drafter"
    shutil.copytree(ASSETS / "tiny_domino", drafter)
    tree = dataclasses.replace(TREE, nodes=9, lanes=4)
    store_tuning(drafter, WIDTHS, tree)

    def loaded(**changes):
        sizes = {"dtype": "float32", "cache_length": 128, "max_new_tokens": 16}
        decoder = domino_jax.load(str(ASSETS / "tiny_qwen3"), str(drafter), **sizes, **changes)
        drafting = decoder.generator.settings.drafting
        return decoder.default_mode, drafting.num_drafts or drafting.widths, drafting.tree

    assert loaded() == ("draft", WIDTHS, None)
    assert loaded(tree=TreeSettings()) == ("tree", WIDTHS, tree)
    assert loaded(num_drafts=5) == ("draft", 5, None)
