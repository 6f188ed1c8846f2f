"""The constants of chains and trees: measured per sampling setting, stored beside the drafter, found again."""

import json
import math
import shutil

import pytest

from configs import tiny
from domino_jax import tune
from domino_jax.decoding import tuned_constants
from domino_jax.decoding.propose import TreeSettings
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.decoding.settings import decode_settings, tree_from_json, with_stored_constants
from domino_jax.decoding.tuned_constants import CHAINS, TREES, Coupling, store, stored
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.decoding_models import random_models, random_prompts
from tests.helpers.paths import ASSETS

WARM, HOT = SamplingParams(1.0), SamplingParams(1.5, top_p=0.9)


def test_stored_constants_are_found_for_their_own_settings_and_kind_alone(tmp_path):
    store(tmp_path, CHAINS, WARM, Coupling(2.0), 3.25, 8)
    store(tmp_path, CHAINS, HOT, Coupling(), 3.0, 8)
    store(tmp_path, TREES, WARM, Coupling(3.0, 2.0), 4.0, 8)
    store(tmp_path, CHAINS, WARM, Coupling(1.4), 3.5, 16)
    found = [stored(str(tmp_path), CHAINS, sampling) for sampling in (WARM, HOT, SamplingParams(0.9))]
    assert found == [Coupling(1.4), Coupling(), Coupling()]
    assert [stored(str(tmp_path), TREES, sampling) for sampling in (WARM, HOT)] == [Coupling(3.0, 2.0), Coupling()]
    rows = json.loads((tmp_path / "decoding.json").read_text())["tuned"]
    assert [row["prompts"] for row in rows] == [8, 16]


def test_a_folder_that_cannot_be_written_is_told_before_the_measuring_and_with_the_constants_after_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tuned_constants.os, "access", lambda folder, mode: False)
    with pytest.raises(DominoError, match="cannot be written, and what is tuned is kept there"):
        tuned_constants.check_writable(tmp_path)

    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuned_constants, "write_whole", full)
    with pytest.raises(DominoError, match="--config.decode.tree.draft_scale=3.0 --config.decode.tree.spread=2.0 by"):
        store(tmp_path, TREES, WARM, Coupling(3.0, 2.0), 4.0, 8)


def test_greedy_decoding_asks_for_no_constant():
    assert stored("/there/is/nothing", CHAINS, SamplingParams()) == Coupling()


@pytest.mark.parametrize(
    "text",
    [
        '{"trees": [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "draft_scale": true, "spread": 1}]}',
        '{"tuned": 3}',
        '{"tuned": [{"draft_scale": 1}]}',
        '{"trees": [{"draft_scale": 1, "spread": 0}]}',
        "[]",
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text):
    (tmp_path / "decoding.json").write_text(text)
    with pytest.raises(DataError, match=r"decoding\.json"):
        [stored(str(tmp_path), kind, WARM) for kind in (CHAINS, TREES)]


def test_decode_takes_what_is_stored_but_for_what_the_recipe_says(tmp_path):
    store(tmp_path, CHAINS, WARM, Coupling(2.0), 3.25, 8)
    store(tmp_path, TREES, WARM, Coupling(3.0, 2.0), 4.0, 8)

    def found(**own):
        config = tiny.get_config()
        config.decode.modes, config.decode.temperature = ("domino", "tree"), 1.0
        config.decode.update(own)
        settings = with_stored_constants(decode_settings(config.decode), str(tmp_path))
        assert tree_from_json(json.loads(json.dumps(settings.as_json()["tree"]))) == settings.tree
        return settings.draft_scale, settings.tree.draft_scale, settings.tree.spread

    assert found() == (2.0, 3.0, 2.0)
    assert found(temperature=0.0) == (math.inf, math.inf, 1.0)
    assert found(draft_scale=5.0, tree={"draft_scale": math.inf}) == (5.0, math.inf, 1.0)
    assert found(tree={"draft_scale": 1.5, "spread": 0.5}) == (2.0, 1.5, 0.5)


SETTINGS = {"stop_ids": (), "cache_slots": 64, "max_new_tokens": 16, "batch_size": 4, "sampling": WARM}


def tried(mode: str, tree: TreeSettings | None = None) -> dict[str, float]:
    drafting = {way: way.drafting(None, tree) for way in tune.ways_of(mode)}
    found = tune.measure(random_models(), random_prompts(8), mode, drafting, SETTINGS)
    return {way.name: tau for way, tau in found.items()}


def test_every_way_to_draft_is_measured_on_the_same_texts(monkeypatch, capsys):
    monkeypatch.setattr(tune, "SCALES", (1.0,))
    found = tried("domino")
    assert list(found) == ["greedy", "coupled, c = 1", "sampled apart"]
    assert found["coupled, c = 1"] > found["sampled apart"] >= 1.0
    assert "parted" not in capsys.readouterr().out


def test_trees_are_measured_coupled_and_not(monkeypatch, capsys):
    """An untrained drafter knows little besides the noise: coupled, a tree emits more."""
    monkeypatch.setattr(tune, "TREE_SCALES", (1.0,))
    monkeypatch.setattr(tune, "SPREADS", (1.0,))
    found = tried("tree", TreeSettings(nodes=8, lanes=4, candidates=16))
    assert list(found) == ["tree, not coupled", "tree, coupled, c = 1, spread 1"]
    assert found["tree, coupled, c = 1, spread 1"] > found["tree, not coupled"] >= 1.0
    assert "parted" not in capsys.readouterr().out


def test_what_is_tuned_is_what_drafts():
    assert tune.tuned_modes(("autoregressive", "backbone", "domino")) == ("domino",)
    assert tune.tuned_modes(("domino", "tree")) == ("domino", "tree")
    assert tune.tuned_modes(("tree",)) == ("tree",)
    assert tune.tuned_modes(("autoregressive",)) == ("backbone",)


@pytest.mark.slow
def test_the_command_stores_what_it_found(tmp_path, monkeypatch):
    shutil.copytree(ASSETS / "tiny_domino", tmp_path / "drafter")
    for name in ("SCALES", "TREE_SCALES", "SPREADS"):
        monkeypatch.setattr(tune, name, (1.0,))
    argv = [
        "tune",
        f"--config={ASSETS.parent / 'configs' / 'tiny.py'}",
        f"--config.drafter.path={tmp_path / 'drafter'}",
        "--config.decode.modes=('domino','tree')",
    ]
    argv += ["--config.decode.temperature=1.0", "--config.decode.num_prompts=4", "--config.decode.max_new_tokens=32"]
    with pytest.raises(SystemExit) as ended:
        tune.cli.run(tune.main, required=("config",), optional=("prompts",), argv=argv)
    assert ended.value.code == 0
    found = json.loads((tmp_path / "drafter" / "decoding.json").read_text())
    # This target is nearly sure at T = 1: what shares no noise is best (docs/tree.md).
    chain, tree = (
        {name: row[name] for name in ("temperature", "prompts", "draft_scale")}
        for row in (*found["tuned"], *found["trees"])
    )
    assert chain == tree == {"temperature": 1.0, "prompts": 4, "draft_scale": "inf"}
    assert found["trees"][0]["spread"] == 1.0 and found["trees"][0]["tau"] > found["tuned"][0]["tau"] > 1


def test_greedy_settings_are_refused():
    argv = ["tune", f"--config={ASSETS.parent / 'configs' / 'tiny.py'}"]
    with pytest.raises(DominoError, match="temperature is 0"):
        tune.main(tune.cli.parse(argv, ("config",), ("prompts",)))
