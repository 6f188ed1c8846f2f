"""tuning.py: which couplings, widths and trees are measured, on the same texts, and which is chosen."""

import dataclasses
import math

import pytest

from domino_jax.decoding.acceptance import tau_pooled
from domino_jax.decoding.decode_settings import Tuning
from domino_jax.decoding.generate import new_generator
from domino_jax.evals import tuning
from domino_jax.evals.trees import record
from domino_jax.evals.tuning import Shape, Timed
from domino_jax.method.settings import DraftSettings, GeneratorSettings, SamplingParams, TreeSettings
from domino_jax.runtime.errors import DominoError
from tests.helpers.decoding_models import random_models, random_prompts

TREE = TreeSettings(nodes=8, lanes=4, candidates=16)
SETTINGS = GeneratorSettings(64, 16, batch_size=4, drafting=DraftSettings(tree=TREE))
WARM = dataclasses.replace(SETTINGS, sampling=SamplingParams(1.0))


def test_the_chain_to_tune_is_the_drafters_own_unless_only_the_backbones_is_wanted():
    assert tuning.chain_mode(("autoregressive", "backbone", "domino")) == "draft"
    assert tuning.chain_mode(("tree",)) == tuning.chain_mode(("autoregressive",)) == "draft"
    assert tuning.chain_mode(("autoregressive", "backbone", "tree")) == "backbone"


@pytest.fixture
def few(monkeypatch):
    """One coupling, one size of tree and two betas, two widths of one block."""
    monkeypatch.setattr(tuning, "SCALES", (1.0,))
    monkeypatch.setattr(tuning, "TREE_SCALES", (1.0,))
    monkeypatch.setattr(tuning, "SPREADS", (1.0,))
    monkeypatch.setattr(tuning, "NODES", (16,))
    monkeypatch.setattr(tuning, "BETAS", (0.0,))
    monkeypatch.setattr(tuning, "REPEATS", 1)


@pytest.mark.parametrize(
    ("mode", "names"),
    [("draft", ["greedy", "coupled, c = 1"]), ("tree", ["not coupled", "coupled, c = 1, spread 1"])],
)
def test_an_untrained_drafter_knows_little_besides_the_noise_so_coupled_drafts_emit_more(few, mode, names):
    candidates = tuning.couplings(WARM.drafting, mode)
    tau = tuning.measure_couplings(random_models(), WARM, mode, candidates, random_prompts(4))
    assert list(tau) == names
    assert tau[names[1]] > tau[names[0]] >= 1.0


def test_the_best_coupling_is_taken(few, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "measure_couplings", lambda *_: {"greedy": 2.0, "coupled, c = 1": 3.0})
    assert tuning.best_coupling(None, WARM, "draft", [[1]]).scale == 1.0
    assert "coupled, c = 1 (best)" in capsys.readouterr().out


def test_widths_halve_and_trees_fit():
    own, half = tuning.chains_of(random_models().drafter.config, "draft")
    assert own == [Shape("draft", 4, width) for width in (4, 2, 1, 0)]
    assert [shape.num_drafts for shape in half] == [2, 1, 0]
    trees = tuning.trees_of(SETTINGS, own[0])
    assert {nodes: {shape.lanes for shape in shapes} for nodes, shapes in trees.items()} == {16: {4}}
    assert tuning.trees_of(SETTINGS, half[0]) == {}  # two drafts of four lanes are less than 15 nodes
    assert tuning.trees_of(dataclasses.replace(SETTINGS, drafting=DraftSettings()), own[0]) == {}


def test_a_drafter_without_blocks_has_chains_of_one_size():
    for head, widths in (("medusa", (4, 2, 1, 0)), ("eagle3", (7, 4, 2, 1, 0))):
        [chains] = tuning.chains_of(random_models(head=head).drafter.config, "draft")
        assert [shape.num_drafts for shape in chains] == list(widths)


def test_trees_are_left_out_where_a_drafter_has_none_or_its_cache_does_not_hold_earlier_places(monkeypatch, capsys):
    """The state of Medusa is that of the last token, so trees of earlier ones cannot be replayed."""
    monkeypatch.setattr(tuning, "measure_shapes", lambda models, settings, *_: shapes_without_trees(settings))
    for head, reason in (
        ("eagle3", "eagle3 drafts chains alone"),
        ("medusa", "medusa keeps the state of its end alone"),
    ):
        models = random_models(head=head)
        assert tuning.tune(models, SETTINGS, "draft", [[1]])[0].tree is None
        shown = capsys.readouterr().out
        assert "no trees are measured: " in shown and reason in shown
    made = new_generator(models, SETTINGS)
    with pytest.raises(DominoError, match="medusa keeps the state"):
        record(models, made, [[1]], [])


def shapes_without_trees(settings) -> list[Timed]:
    assert settings.drafting.tree is None
    return [timed("draft", 4, 4, 9.0)]


def timed(mode, block, drafts, rate, nodes=0, rows=1):
    lanes, beta = (4, -0.2) if nodes else (0, 0.0)
    return Timed(Shape(mode, block, drafts, nodes, lanes, beta), rows, 2.0, 1.0, rate, 1.5)


PLANTED = dataclasses.replace(TREE, nodes=32, beta=-0.2, depth=4)


@pytest.mark.parametrize(
    ("fastest", "expected"),
    [
        (timed("draft", 4, 2, 9.0), Tuning("draft", 4, 2, math.inf, PLANTED, ((1, 2),))),
        (timed("tree", 4, 4, 9.0, nodes=32), Tuning("tree", 4, 4, math.inf, PLANTED, ((1, 4),))),
        # No tree was measured in this block.
        (timed("draft", 2, 1, 9.0), Tuning("draft", 2, 1, math.inf, None, ((1, 1),))),
        # A plain step is the fastest; where all rounds draft alike, two drafts are.
        (timed("draft", 2, 0, 9.0), Tuning("draft", 2, 2, math.inf, None, ((1, 0),))),
    ],
)
def test_the_fastest_shape_decides_the_block_for_chains_and_trees(monkeypatch, capsys, fastest, expected):
    rest = [timed("draft", 4, 4, 8.0), timed("tree", 4, 4, 7.0, nodes=32), timed("draft", 2, 2, 6.0)]
    monkeypatch.setattr(tuning, "measure_shapes", lambda *_: [fastest, *rest])
    assert tuning.tune(random_models(), SETTINGS, "draft", [[1]])[0] == expected
    assert f"1 × {fastest.shape.name}" in capsys.readouterr().out


def test_every_number_of_rows_has_its_width_in_the_block_that_serves_all_best():
    """Block 8 is far ahead for one row, block 4 a little for two; four rows are fastest without drafts."""
    rates = {
        **{(8, 8, 1): 9.0, (8, 4, 1): 8.0, (8, 0, 1): 3.0, (4, 4, 1): 5.0, (4, 0, 1): 3.0},
        **{(8, 8, 2): 6.0, (8, 4, 2): 7.0, (8, 0, 2): 4.0, (4, 4, 2): 7.5, (4, 0, 2): 4.0},
        **{(8, 8, 4): 4.0, (8, 4, 4): 5.0, (8, 0, 4): 6.0, (4, 4, 4): 5.5, (4, 0, 4): 6.0},
    }
    shapes = [timed("draft", block, drafts, rate, rows=rows) for (block, drafts, rows), rate in rates.items()]
    found = tuning.choose_shapes(sorted(shapes, key=lambda one: -one.tokens_per_second), DraftSettings())
    assert found == Tuning("draft", 8, 4, math.inf, None, ((1, 8), (2, 4), (4, 0)))


def test_batches_double_up_to_the_largest():
    assert [tuning.batch_sizes(largest) for largest in (1, 2, 6, 32)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16, 32],
    ]


def test_expected_tokens_grow_with_the_width_and_of_each_size_of_tree_the_best_is_timed(few, monkeypatch):
    chains = [[Shape("draft", 4, width) for width in (4, 1, 0)]]
    monkeypatch.setattr(tuning, "chains_of", lambda config, mode: chains)
    models, prompts = random_models(), random_prompts(3)
    monkeypatch.setattr(tuning, "batch_sizes", lambda largest: [2, largest])
    found = tuning.measure_shapes(models, SETTINGS, "draft", prompts)
    tau = {(one.shape.num_drafts, one.shape.nodes): one.tau for one in found}
    assert len(tau) == 4 and 1 == tau[0, 0] < tau[1, 0] <= tau[4, 0] <= tau[4, 16]
    assert len(found) == 7 and {one.rows for one in found if one.shape.nodes} == {4}
    assert all(one.break_even_tau is None or one.break_even_tau >= 0 for one in found)
    [shape] = [one.shape for one in found if one.shape.nodes]
    drafting = DraftSettings(tree=shape.tree(TREE))
    looped = new_generator(models, dataclasses.replace(SETTINGS, drafting=drafting))
    assert tau_pooled(looped.generate(models, prompts, "tree").answers) == pytest.approx(tau[4, 16])
    assert [one.tokens_per_second for one in found] == sorted((one.tokens_per_second for one in found), reverse=True)
