"""tuning.py: which widths and trees are measured, and which are chosen."""

import dataclasses

import pytest

from domino_jax.decoding.acceptance import tau_pooled
from domino_jax.decoding.generate import new_generator
from domino_jax.evals import tuning
from domino_jax.evals.trees import record
from domino_jax.evals.tuning import Shape, Timed
from domino_jax.method.settings import DecodeSettings, DraftSettings, TreeSettings
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import random_models, random_prompts

TREE = TreeSettings(nodes=8, lanes=4, candidates=16)
SETTINGS = DecodeSettings(cache_length=64, max_new_tokens=16, batch_size=4, drafting=DraftSettings(tree=TREE))


def test_the_chain_to_tune_is_the_drafters_own_unless_only_the_backbones_is_wanted():
    assert tuning.chain_mode(("autoregressive", "backbone", "domino")) == "draft"
    assert tuning.chain_mode(("tree",)) == tuning.chain_mode(("autoregressive",)) == "draft"
    assert tuning.chain_mode(("autoregressive", "backbone", "tree")) == "backbone"


@pytest.fixture
def few(monkeypatch):
    """One size of tree and one beta, one repetition."""
    monkeypatch.setattr(tuning, "NODES", (16,))
    monkeypatch.setattr(tuning, "BETAS", (0.0,))
    monkeypatch.setattr(tuning, "REPEATS", 1)


def test_widths_halve_and_trees_fit():
    chains = tuning.chains_of(random_models().drafter.config, "draft")
    assert chains == [Shape("draft", width) for width in (4, 2, 1, 0)]
    trees = tuning.trees_of(SETTINGS, chains[0])
    assert {nodes: {shape.lanes for shape in shapes} for nodes, shapes in trees.items()} == {16: {4}}
    assert tuning.trees_of(SETTINGS, chains[1]) == {}  # two drafts of four lanes are less than 15 nodes
    assert tuning.trees_of(SETTINGS.change(tree=None), chains[0]) == {}


def test_trees_are_left_out_where_a_drafter_has_none_or_its_cache_does_not_hold_earlier_places(monkeypatch, capsys):
    """The state of Medusa is that of the last token, so trees of earlier ones cannot be replayed."""
    monkeypatch.setattr(tuning, "measure_shapes", lambda models, settings, *_: shapes_without_trees(settings))
    for head, reason in (
        ("eagle3", "eagle3 drafts chains alone"),
        ("medusa", "medusa keeps the state of its end alone"),
    ):
        models = random_models(head=head)
        assert tuning.tune(models, SETTINGS, (), "draft", [[1]]) == (((1, 4),), None)
        shown = capsys.readouterr().out
        assert "no trees are measured: " in shown and reason in shown
    made = new_generator(models, SETTINGS)
    with pytest.raises(DominoError, match="medusa keeps the state"):
        record(models, made, [[1]], [])


def shapes_without_trees(settings) -> list[Timed]:
    assert settings.drafting.tree is None
    return [timed("draft", 4, 9.0)]


def timed(mode, drafts, rate, nodes=0, rows=1):
    lanes, beta = (4, -0.2) if nodes else (0, 0.0)
    return Timed(Shape(mode, drafts, nodes, lanes, beta), rows, 2.0, 1.0, rate)


def test_every_number_of_rows_has_its_fastest_width_and_the_fastest_tree_is_taken(monkeypatch, capsys):
    shapes = [
        *(timed("draft", 8, 9.0), timed("draft", 4, 8.0), timed("draft", 0, 3.0)),
        *(timed("draft", 4, 7.0, rows=2), timed("draft", 8, 6.0, rows=2), timed("draft", 0, 5.0, rows=4)),
        *(timed("tree", 4, 4.0, nodes=32, rows=4), timed("tree", 4, 3.0, nodes=16, rows=4)),
    ]
    monkeypatch.setattr(tuning, "measure_shapes", lambda *_: shapes)
    widths, tree = tuning.tune(random_models(), SETTINGS, (), "draft", [[1]])
    assert widths == ((1, 8), (2, 4), (4, 0))
    assert tree == dataclasses.replace(TREE, nodes=32, beta=-0.2, depth=4)
    assert f"4 × {shapes[-2].shape.name}" in capsys.readouterr().out


def test_batches_double_up_to_the_largest():
    assert [tuning.batch_sizes(largest) for largest in (1, 2, 6, 32)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16, 32],
    ]


def test_expected_tokens_grow_with_the_width_and_of_each_size_of_tree_the_best_is_timed(few, monkeypatch):
    chains = [Shape("draft", width) for width in (4, 1, 0)]
    monkeypatch.setattr(tuning, "chains_of", lambda config, mode: chains)
    models, prompts = random_models(), random_prompts(3)
    monkeypatch.setattr(tuning, "batch_sizes", lambda largest: [2, largest])
    found = tuning.measure_shapes(models, SETTINGS, (), "draft", prompts)
    tau = {(one.shape.num_drafts, one.shape.nodes): one.tau for one in found}
    assert len(tau) == 4 and 1 == tau[0, 0] < tau[1, 0] <= tau[4, 0] <= tau[4, 16]
    assert len(found) == 7 and {one.rows for one in found if one.shape.nodes} == {4}
    [shape] = [one.shape for one in found if one.shape.nodes]
    looped = new_generator(models, SETTINGS.change(tree=shape.tree(TREE)))
    assert tau_pooled(looped.generate(models, prompts, "tree").answers) == pytest.approx(tau[4, 16])
    assert [one.tokens_per_second for one in found] == sorted((one.tokens_per_second for one in found), reverse=True)
