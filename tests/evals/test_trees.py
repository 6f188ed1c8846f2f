"""trees.py: figures and pictures of recorded rounds; a replay gives what decoding with these trees gives."""

import dataclasses
import functools

import pytest

from domino_jax.evals.lanes import Lane, record_rounds
from domino_jax.evals.prompts import Prompt
from domino_jax.evals.trees import (
    LEGIBLE,
    RecordedTree,
    acceptance,
    acceptance_rows,
    draw_trees,
    legible,
    record,
    replay,
    replayed_tau,
    sibling_ranks,
)
from domino_jax.method.settings import SamplingParams, TreeSettings
from tests.helpers.decoding_models import make_generator, random_models, random_prompts

# Root over 1, 2, 3 and 1 over 4: the second child is accepted, and nothing below it.
SECOND = RecordedTree([9, 1, 2, 3, 4], [0, 0, 0, 0, 1], [0, 1, 1, 1, 2], [0, 2], 8)
FIRST = RecordedTree([9, 1, 4], [0, 0, 1], [0, 1, 2], [0, 1, 2], 5)


def test_acceptance_by_depth_and_by_rank():
    assert sibling_ranks(SECOND) == [0, 1, 2, 3, 1]  # children count in their parent's order
    found = acceptance([SECOND, FIRST])
    assert found["by_depth"] == [1.0, 0.5]
    assert found["by_rank"] == [2 / 3, 1 / 3]
    assert found["nodes_by_depth"] == [2.0, 1.0]
    sentence, rows = acceptance_rows(found)
    assert sentence == "Accepted drafts by rank: 66.7% rank 1, 33.3% rank 2."
    assert rows[:2] == [["depth", "1", "2"], ["rounds that accept a draft there", "1.00", "0.50"]]


def test_a_tree_of_more_nodes_than_can_be_read_is_drawn_by_its_path_and_the_nodes_beside_it(tmp_path):
    """Root over 1 to 99; 3 over 100 to 126, of which 102 is accepted; 1 over 127, which no path passes."""
    parents = [0] * 100 + [3] * 27 + [1]
    depths = [0] + [1] * 99 + [2] * 28
    whole = RecordedTree(list(range(128)), parents, depths, [0, 3, 102], 8)
    drawn = legible(whole)
    assert len(drawn) == LEGIBLE and {0, 1, 2, 3, 100, 101, 102} <= set(drawn) and 127 not in drawn
    assert legible(SECOND) == [0, 1, 2, 3, 4]
    path = draw_trees([FIRST, SECOND, whole], lambda token: f"<{token}>\n$", tmp_path / "plots")
    assert path.name == "trees.png" and path.read_bytes()[:4] == b"\x89PNG"


TREE = TreeSettings(nodes=9, lanes=4, candidates=8, beta=-0.1)
PROMPTS = random_prompts(2, shortest=4)


@functools.lru_cache
def decoded(temperature: float):
    """A generator with coupled trees where there is noise to couple with, and its answers."""
    made = make_generator(random_models(), tree=TREE, sampling=SamplingParams(temperature))
    return made, made.generate(PROMPTS, "tree")


def recordings_of(temperature: float):
    made, answers = decoded(temperature)
    return record(made.models, made.generator, PROMPTS, answers)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_emits_what_the_loop_emits(temperature):
    answers = decoded(temperature)[1]
    emitted = [replay(recording, TREE) for recording in recordings_of(temperature)]
    assert emitted == [answer.accept_lengths for answer in answers]
    assert max(map(max, emitted)) > 1


def test_more_nodes_never_accept_less_of_a_text_and_one_draft_can_at_most_be_two_tokens():
    recordings = recordings_of(1.0)
    by_size = [replayed_tau(recordings, dataclasses.replace(TREE, nodes=nodes)) for nodes in (2, 6, 12, 24)]
    assert by_size[0] <= 2 and by_size[0] < by_size[-1]
    for recording, answer in zip(recordings, decoded(1.0)[1], strict=True):
        assert 1 + sum(replay(recording, TREE)) == len(answer.token_ids)


def test_an_answer_of_one_token_has_no_rounds():
    made, answers = decoded(1.0)
    short = dataclasses.replace(answers[0], token_ids=answers[0].token_ids[:1])
    [recording] = record(made.models, made.generator, PROMPTS[:1], [short])
    assert replay(recording, TREE) == [] and replayed_tau([recording], TREE) == 0.0


def test_a_recording_is_the_run():
    """Its rounds emit the tree mode's text, and each accepted node is a child of the one before."""
    made, answers = decoded(1.0)
    lane = Lane("tree", "tree", made.models, made.generator)
    prompts = [Prompt(str(index), tuple(ids), index) for index, ids in enumerate(PROMPTS)]
    for rounds, answer in zip(record_rounds(lane, prompts, most=99), answers, strict=True):
        assert answer.token_ids[:1] + sum((emitted for emitted, _ in rounds), []) == answer.token_ids
        for emitted, seen in rounds:
            tree = RecordedTree.of(seen)
            assert [*(tree.tokens[node] for node in tree.path[1:]), tree.emitted][: len(emitted)] == emitted
            assert [tree.parents[node] for node in tree.path[1:]] == tree.path[:-1]
            assert all(parent < node for node, parent in enumerate(tree.parents[1:], 1))
    assert len(record_rounds(lane, prompts, most=2)[0]) == 2


def test_a_chain_that_is_tuned_to_plain_steps_is_recorded_as_it_ran():
    made = make_generator(random_models(), batch_size=1, max_new_tokens=8, widths=((1, 0),))
    [answer] = made.generate(PROMPTS[:1], "draft")
    [rounds] = record_rounds(
        Lane("draft", "draft", made.models, made.generator), [Prompt("0", tuple(PROMPTS[0]), 0)], 9
    )
    assert answer.token_ids[:1] + sum((emitted for emitted, _ in rounds), []) == answer.token_ids
    assert {drafts.shape for _, drafts in rounds} == {(1, 0)}
