"""tuning.py: which couplings, widths and trees are measured, on the same texts, and which is chosen."""

import dataclasses
import math

import pytest

from domino_jax.decoding.acceptance import tau_pooled
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import DraftSettings, GeneratorSettings, SamplingParams, TreeSettings, Tuning
from domino_jax.evals import tuning
from domino_jax.evals.tuning import Shape, Timed
from tests.helpers.decoding_models import random_models, random_prompts

TREE = TreeSettings(nodes=8, lanes=4, candidates=16)
SETTINGS = GeneratorSettings(64, 16, batch_size=4, drafting=DraftSettings(tree=TREE))
WARM = dataclasses.replace(SETTINGS, sampling=SamplingParams(1.0))


def test_the_chain_to_tune_is_the_drafters_own_unless_only_the_backbones_is_wanted():
    assert tuning.chain_mode(("autoregressive", "backbone", "domino")) == "draft"
    assert tuning.chain_mode(("tree",)) == tuning.chain_mode(("autoregressive",)) == "draft"
    assert tuning.chain_mode(("autoregressive", "backbone", "tree")) == "backbone"


def measured(mode: str) -> dict[str, float]:
    candidates = tuning.couplings(WARM.drafting, mode)
    return tuning.measure_couplings(random_models(), WARM, mode, candidates, random_prompts(8))


def test_couplings_of_chains_are_measured_on_the_same_texts(monkeypatch, capsys):
    monkeypatch.setattr(tuning, "SCALES", (1.0,))
    found = measured("draft")
    assert list(found) == ["greedy", "coupled, c = 1", "independent noise"]
    assert found["coupled, c = 1"] > found["independent noise"] >= 1.0
    assert "differ" not in capsys.readouterr().out


def test_trees_are_measured_coupled_and_not(monkeypatch, capsys):
    """An untrained drafter knows little besides the noise: coupled, a tree emits more."""
    monkeypatch.setattr(tuning, "TREE_SCALES", (1.0,))
    monkeypatch.setattr(tuning, "SPREADS", (1.0,))
    found = measured("tree")
    assert list(found) == ["not coupled", "coupled, c = 1, spread 1"]
    assert found["coupled, c = 1, spread 1"] > found["not coupled"] >= 1.0
    assert "differ" not in capsys.readouterr().out


def test_the_best_coupling_is_taken_and_independent_noise_is_shown_for_comparison_only(monkeypatch, capsys):
    tau = {"greedy": 2.0, "coupled, c = 1": 3.0, "independent noise": 4.0}
    monkeypatch.setattr(tuning, "SCALES", (1.0,))
    monkeypatch.setattr(tuning, "measure_couplings", lambda *_: tau)
    found = tuning.best_coupling(None, WARM, "draft", [[1]])
    assert (found.scale, found.own_noise) == (1.0, False)
    assert "coupled, c = 1 (best)" in capsys.readouterr().out


def test_widths_halve_and_trees_fit():
    own, half = tuning.chains_of(random_models().drafter.config, "draft")
    assert own == [Shape("draft", 4, 4), Shape("draft", 4, 2), Shape("draft", 4, 1)]
    assert [shape.num_drafts for shape in half] == [2, 1]
    trees = tuning.trees_of(SETTINGS, own[0])
    assert {nodes: {shape.lanes for shape in shapes} for nodes, shapes in trees.items()} == {16: {4}}
    assert tuning.trees_of(SETTINGS, half[0]) == {}  # two drafts of four lanes are less than 15 nodes
    assert tuning.trees_of(dataclasses.replace(SETTINGS, drafting=DraftSettings()), own[0]) == {}


def timed(mode, block, drafts, rate, nodes=0):
    lanes, beta = (4, -0.2) if nodes else (0, 0.0)
    return Timed(Shape(mode, block, drafts, nodes, lanes, beta), 2.0, 1.0, rate)


PLANTED = dataclasses.replace(TREE, nodes=32, beta=-0.2)


@pytest.mark.parametrize(
    ("fastest", "expected"),
    [
        (timed("draft", 4, 2, 9.0), Tuning("draft", 4, 2, math.inf, PLANTED)),
        (timed("tree", 4, 4, 9.0, nodes=32), Tuning("tree", 4, 4, math.inf, PLANTED)),
        (timed("draft", 2, 1, 9.0), Tuning("draft", 2, 1, math.inf, None)),  # no tree was measured in this block
    ],
)
def test_the_fastest_shape_decides_the_block_for_chains_and_trees(monkeypatch, capsys, fastest, expected):
    rest = [timed("draft", 4, 4, 8.0), timed("tree", 4, 4, 7.0, nodes=32), timed("draft", 2, 2, 6.0)]
    monkeypatch.setattr(tuning, "measure_shapes", lambda *_: [fastest, *rest])
    assert tuning.tune(random_models(), SETTINGS, "draft", [[1]])[0] == expected
    assert fastest.shape.name in capsys.readouterr().out


def test_expected_tokens_grow_with_the_width_and_of_each_size_of_tree_the_best_is_timed():
    models, prompts = random_models(), random_prompts(3)
    found = tuning.measure_shapes(models, SETTINGS, "draft", prompts)
    tau = {(one.shape.block_size, one.shape.num_drafts, one.shape.nodes): one.tau for one in found}
    assert 1 < tau[4, 1, 0] <= tau[4, 2, 0] <= tau[4, 4, 0] <= tau[4, 4, 16]
    assert sorted(tau)[-1] == (4, 4, 16) and len(tau) == 6
    [shape] = [one.shape for one in found if one.shape.nodes]
    drafting = DraftSettings(tree=shape.tree(TREE))
    looped = new_generator(models, dataclasses.replace(SETTINGS, drafting=drafting))
    assert tau_pooled(looped.generate(models, prompts, "tree").answers) == pytest.approx(tau[4, 4, 16])
    assert [one.tokens_per_second for one in found] == sorted((one.tokens_per_second for one in found), reverse=True)
