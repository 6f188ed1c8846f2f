"""tree_report.py: what a recorded round says, and the figures and the picture made of it."""

import functools

import pytest

from domino_jax.decoding.settings import TreeSettings
from domino_jax.evals.tree_report import (
    LEGIBLE,
    RecordedTree,
    acceptance,
    acceptance_table,
    draw_trees,
    legible,
    record_trees,
    sibling_ranks,
)
from tests.helpers.decoding_models import make_generator, random_models, random_prompts, texts

# Root over 1, 2, 3 and 1 over 4: the second child stands, and below it nothing.
SECOND = RecordedTree([9, 1, 2, 3, 4], [0, 0, 0, 0, 1], [0, 1, 1, 1, 2], [0, 2], 8)
FIRST = RecordedTree([9, 1, 4], [0, 0, 1], [0, 1, 2], [0, 1, 2], 5)


def test_ranks_count_a_parents_children_in_their_order():
    assert sibling_ranks(SECOND) == [0, 1, 2, 3, 1]


def test_acceptance_by_depth_and_by_rank():
    found = acceptance([SECOND, FIRST])
    assert found["by_depth"] == [1.0, 0.5]
    assert found["by_rank"] == [2 / 3, 1 / 3]
    assert found["nodes_by_depth"] == [2.0, 1.0]


def test_the_table_holds_a_column_for_each_depth():
    lines = acceptance_table(acceptance([SECOND, FIRST])).splitlines()
    assert lines[2] == "| rounds that accept a draft there | 1.00 | 0.50 |"
    assert lines[-1] == "Accepted drafts by rank: 66.7% rank 1, 33.3% rank 2."


def test_the_picture_is_written(tmp_path):
    path = draw_trees([FIRST, SECOND], lambda token: f"<{token}>\n$", tmp_path / "plots")
    assert path.name == "trees.png" and path.read_bytes()[:4] == b"\x89PNG"


def test_a_tree_of_more_nodes_than_can_be_read_is_cut_to_its_path_and_what_stood_beside_it(tmp_path):
    """Root over 1 to 99; 3 over 100 to 126, of which 102 stands; 1 over 127, which no path passes."""
    parents = [0] * 100 + [3] * 27 + [1]
    depths = [0] + [1] * 99 + [2] * 28
    whole = RecordedTree(list(range(128)), parents, depths, [0, 3, 102], 8)
    part = legible(whole)
    assert [part.tokens[node] for node in part.path] == [0, 3, 102] and len(part.tokens) == LEGIBLE
    assert {part.tokens[part.parents[node]] for node in range(1, LEGIBLE)} == {0, 3}
    near = [token for token in part.tokens if token not in (0, 3, 102)]
    assert set(near) <= {*range(1, 99), *range(100, 127)} and {1, 2, 100, 101} <= set(near)
    assert legible(SECOND) is SECOND
    assert draw_trees([whole], str, tmp_path).exists()


@functools.lru_cache
def made():
    return make_generator(random_models(4), tree=TreeSettings(nodes=9, lanes=4, candidates=8))


@pytest.mark.slow
def test_a_recording_is_the_run():
    """Its rounds emit the tree mode's text, and each accepted node is a child of the one before."""
    prompts = random_prompts(2)
    answers = made().generate(prompts, "tree")
    recorded = record_trees(made().models, made().generator, prompts, rounds=99)
    for trees, answer in zip(recorded, answers, strict=True):
        emitted = [[*(tree.tokens[node] for node in tree.path[1:]), tree.emitted] for tree in trees]
        assert sum(emitted, answer.token_ids[:1])[: len(answer.token_ids)] == answer.token_ids
        for tree in trees:
            assert [tree.parents[node] for node in tree.path[1:]] == tree.path[:-1]
            assert all(parent < node for node, parent in enumerate(tree.parents[1:], 1))
    assert texts(answers)
