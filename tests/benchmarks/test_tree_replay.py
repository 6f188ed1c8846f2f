"""tree_replay.py: a replay gives what decoding with these trees gives."""

import dataclasses
import functools

import pytest

from benchmarks.studies.tree_replay import record, replay, replayed_tau
from domino_jax.method.settings import SamplingParams, TreeSettings
from tests.helpers.decoding_models import make_generator, random_models, random_prompts

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
