"""What tune measured: stored per setup beside the drafter, and used where the recipe or the caller leaves it open."""

import dataclasses
import json
import math
import shutil

import pytest

import domino_jax
from configs import qwen3
from domino_jax.decoding import stored_tuning as tunings
from domino_jax.decoding.decode_settings import Tuning, decode_settings
from domino_jax.decoding.stored_tuning import Setup, store_tuning, stored_tuning, tuned_settings
from domino_jax.method.settings import SamplingParams, TreeSettings
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.decoding_models import random_models
from tests.helpers.paths import ASSETS

GREEDY, WARM = Setup("float32", 1, SamplingParams()), Setup("float32", 1, SamplingParams(1.0))
TREE = TreeSettings(nodes=20, lanes=8, candidates=32, beta=-0.2, draft_scale=3.0, spread=2.0)
CHAIN = Tuning("draft", 8, 5, 2.0, None, ((1, 5),))
PLANTED = Tuning("tree", 4, 3, math.inf, TREE, ((1, 3), (2, 0)))
# Of the tuning's block two chains.
MEASURED = [
    {"rows": rows, "block_size": block, "num_drafts": 3, "nodes": nodes, "break_even_tau": tau}
    for rows, block, nodes, tau in ((2, 4, 0, None), (1, 4, 0, 1.5), (1, 8, 0, 1.9), (1, 4, 16, 2.5))
]


def test_a_tuning_is_found_for_its_own_setup_only(tmp_path):
    store_tuning(tmp_path, WARM, PLANTED, 8)
    store_tuning(tmp_path, GREEDY, CHAIN, 8)
    store_tuning(tmp_path, WARM, dataclasses.replace(PLANTED, num_drafts=2), 16, MEASURED)
    found = [stored_tuning(str(tmp_path), setup) for setup in (GREEDY, WARM)]
    assert found == [CHAIN, dataclasses.replace(PLANTED, num_drafts=2)]
    others = {"dtype": "bfloat16", "batch_size": 8, "sampling": SamplingParams(0.9), "device": "TPU v5e"}
    others |= {"head_candidates": 64, "confidence": 0.5, "parity": "fixed_shape"}
    for name, value in others.items():
        assert stored_tuning(str(tmp_path), dataclasses.replace(WARM, **{name: value})) is None
    rows = json.loads((tmp_path / "decoding.json").read_text())["tuned"]
    assert [row["prompts"] for row in rows] == [8, 16] and rows[1]["measured"] == MEASURED
    assert [tuning.break_even for tuning in found] == [(), ((1, 3, 1.5), (2, 3, None))]


def test_a_folder_that_cannot_be_written_is_refused_before_and_after_the_measurement(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tunings, "write_whole", full)
    with pytest.raises(DominoError, match=r"No space left.*--config.decode.num_drafts=5"):
        store_tuning(tmp_path, GREEDY, CHAIN, 8)
    monkeypatch.setattr(tunings.os, "access", lambda folder, mode: False)
    with pytest.raises(DominoError, match="cannot be written, and the tuning is stored there"):
        tunings.check_writable(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"num_drafts": "5"},
        {"num_drafts": 0},
        {"widths": 5},
        {"widths": []},
        {"widths": [[1, 5], [1, 4]]},
        {"widths": [[2, 5], [1, 4]]},
        {"widths": [[0, 5]]},
        {"widths": [[1, 9]]},
        {"widths": [[1, True]]},
        {"widths": [[1, -1]]},
        {"widths": [[1, 2, 3]]},
        {"batch_size": "1"},
        {"measured": [{"rows": 1, "block_size": 8, "nodes": 0}]},
        {"measured": [{"rows": 1, "block_size": 8, "nodes": 0, "num_drafts": 5, "break_even_tau": "x"}]},
        {"draft_scale": "x"},
        {"draft_scale": -1.0},
        {"mode": "tree"},
        {"mode": "forest"},
        {"tree": {"leaves": 3}},
        {"tree": {"nodes": "x", "draft_scale": None}},
        {"tree": 5},
    ],
)
def test_a_damaged_file_is_refused_by_its_name(tmp_path, change):
    store_tuning(tmp_path, GREEDY, CHAIN, 8)
    path = tmp_path / "decoding.json"
    [row] = json.loads(path.read_text())["tuned"]
    path.write_text(json.dumps({"tuned": [{**row, **change}]}))
    with pytest.raises(DataError, match=r"decoding\.json is damaged or of an earlier version; remove it and run"):
        stored_tuning(str(tmp_path), GREEDY)


@pytest.mark.parametrize("name", ["parity", "head_candidates"])
def test_a_file_of_an_earlier_version_is_refused(tmp_path, name):
    store_tuning(tmp_path, GREEDY, CHAIN, 8)
    path = tmp_path / "decoding.json"
    [row] = json.loads(path.read_text())["tuned"]
    del row[name]
    path.write_text(json.dumps({"tuned": [row]}))
    with pytest.raises(DataError, match=r"of an earlier version; remove it"):
        stored_tuning(str(tmp_path), GREEDY)


def test_a_tuning_of_larger_batches_serves_smaller_ones_unless_they_have_their_own(tmp_path):
    """Tuned for 1, 8 and 32 rows."""
    tunings_by_size = {size: dataclasses.replace(CHAIN, widths=((1, 5), (size, 2))) for size in (8, 32)}
    for size, tuning in {1: CHAIN, **tunings_by_size}.items():
        store_tuning(tmp_path, dataclasses.replace(GREEDY, batch_size=size), tuning, 8)

    def found(batch_size, largest=0):
        tuning = stored_tuning(str(tmp_path), dataclasses.replace(GREEDY, batch_size=batch_size), largest)
        return tuning and tuning.widths[-1][0]

    assert [found(size) for size in (1, 2, 8, 9, 32, 33)] == [1, 8, 8, 32, 32, None]
    assert (found(1, 16), found(1, 32), found(1, 64), found(8, 64)) == (32, 32, 32, 32)  # of concurrency
    config = qwen3.get_config("none").decode
    config.update({"dtype": "float32", "modes": ("draft",), "head_candidates": 0, "concurrency": (1, 32)})
    assert tuned_settings(config, "domino", str(tmp_path)).widths == ((1, 5), (32, 2))


@pytest.mark.parametrize("text", ['{"tuned": 3}', '{"tuned": [{"draft_scale": 1}]}', "[]"])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    (tmp_path / "decoding.json").write_text(text)
    with pytest.raises(DataError, match=r"decoding\.json"):
        stored_tuning(str(tmp_path), GREEDY)


def test_a_tuning_is_of_one_rank_of_the_head_and_earlier_files_are_of_whole_heads(tmp_path):
    store_tuning(tmp_path, dataclasses.replace(GREEDY, head_rank=16), PLANTED, 8)
    store_tuning(tmp_path, GREEDY, CHAIN, 8)
    stored = json.loads((tmp_path / "decoding.json").read_text())
    assert stored_tuning(str(tmp_path), dataclasses.replace(GREEDY, head_rank=8)) is None
    for row in stored["tuned"]:
        if row["head_rank"] == 0:
            del row["head_rank"]
    (tmp_path / "decoding.json").write_text(json.dumps(stored))
    assert stored_tuning(str(tmp_path), GREEDY) == CHAIN
    assert stored_tuning(str(tmp_path), dataclasses.replace(GREEDY, head_rank=16)) == PLANTED


def settings_of(folder, **changes):
    config = qwen3.get_config("none")
    config.decode.update({"dtype": "float32", "modes": ("draft", "tree"), "head_candidates": 0, **changes})
    return tuned_settings(config.decode, "domino", str(folder) if folder else None)


def test_decode_takes_the_tuning_except_for_what_the_recipe_sets(tmp_path):
    store_tuning(tmp_path, GREEDY, CHAIN, 8)
    store_tuning(tmp_path, WARM, PLANTED, 8)

    def widths(folder=tmp_path, **changes):
        settings = settings_of(folder, **changes)
        return settings.block_size, settings.num_drafts, settings.draft_scale

    assert widths() == (8, 5, 2.0)
    assert widths(temperature=1.0) == (4, 3, math.inf)
    assert widths(num_drafts=2) == (0, 2, 2.0)
    assert settings_of(tmp_path).drafting.widths == ((1, 5),)
    assert settings_of(tmp_path, num_drafts=2).drafting.widths == ()
    assert settings_of(tmp_path, parity="fixed_shape").drafting.widths == ()
    assert widths(folder=None) == widths(simulate_tau=2.0) == (0, 0, math.inf)
    assert widths(modes=("autoregressive",), folder="/there/is/nothing") == (0, 0, math.inf)

    def tree(**section):
        return settings_of(tmp_path, temperature=1.0, tree=section).tree

    assert tree() == TREE
    assert tree(nodes=16) == TreeSettings(nodes=16, draft_scale=3.0, spread=2.0)
    assert settings_of(None).tree == TreeSettings()


def test_a_tree_without_a_depth_is_as_deep_as_the_block_whatever_chains_are_tuned_to(tmp_path):
    store_tuning(tmp_path, WARM, PLANTED, 8)
    config = random_models(4).drafter.config

    def depths(**changes):
        settings = settings_of(tmp_path, temperature=1.0, tree={"nodes": 16}, **changes)
        return [settings.draftings(config)[mode].width(config) for mode in ("draft", "tree")]

    assert (depths(), depths(num_drafts=2)) == ([3, 4], [2, 2])


def test_what_a_report_holds_of_the_settings_is_json(tmp_path):
    store_tuning(tmp_path, WARM, dataclasses.replace(PLANTED, tree=dataclasses.replace(TREE, draft_scale=math.inf)), 8)
    values = settings_of(tmp_path, temperature=1.0).as_json()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["draft_scale"] == values["tree"]["draft_scale"] == "inf"
    assert values["widths"] == [[1, 3], [2, 0]]


def test_the_python_apis_defaults_are_those_of_the_recipes():
    recipe = decode_settings(qwen3.get_config("none").decode, "domino")
    loading = domino_jax.LoadSettings()
    names = ["dtype", "cache_length", "max_new_tokens", "batch_size", "thinking", "temperature"]
    for name in (*names, "head_rank", "confidence"):
        assert getattr(loading, name) == getattr(recipe, name), name
    assert loading.drafting(None).head_candidates == recipe.head_candidates
    config = qwen3.get_config("none")
    config.decode.modes = ("tree",)
    assert decode_settings(config.decode, "domino").tree == TreeSettings()


def test_the_python_api_takes_the_candidates_that_the_newest_tuning_was_measured_with(tmp_path):
    any_candidates = dataclasses.replace(GREEDY, head_candidates=None)
    for candidates in (0, 8):
        store_tuning(tmp_path, dataclasses.replace(GREEDY, head_candidates=candidates), CHAIN, 8)
        tuning = stored_tuning(str(tmp_path), any_candidates)
        assert tuning == CHAIN and tuning.head_candidates == candidates
        assert domino_jax.LoadSettings().drafting(tuning).head_candidates == candidates
        assert domino_jax.LoadSettings(head_candidates=64).drafting(tuning).head_candidates == 64


def test_the_python_api_uses_the_tuning_unless_the_caller_says_otherwise(tmp_path):
    drafter = tmp_path / "drafter"
    shutil.copytree(ASSETS / "tiny_domino", drafter)
    tree = dataclasses.replace(TREE, nodes=9, lanes=4, draft_scale=None, spread=1.0)
    store_tuning(drafter, GREEDY, Tuning("tree", 4, 3, math.inf, tree, ((1, 3),)), 8)
    store_tuning(drafter, WARM, Tuning("draft", 4, 2, 1.5, None, ((1, 2),)), 8)

    def loaded(**changes):
        sizes = {"dtype": "float32", "cache_length": 128, "max_new_tokens": 16}
        decoder = domino_jax.load(str(ASSETS / "tiny_qwen3"), str(drafter), **sizes, **changes)
        drafting = decoder.generator.settings.drafting
        drafts = drafting.num_drafts or drafting.widths
        return decoder.default_mode, decoder.models.drafter.config.block_size, drafts, drafting.scale

    whole = json.loads((drafter / "config.json").read_text())["block_size"]
    assert loaded() == ("tree", 4, ((1, 3),), math.inf)
    assert loaded(temperature=1.0) == ("draft", 4, ((1, 2),), 1.5)
    assert loaded(num_drafts=5) == ("draft", whole, 5, math.inf)
