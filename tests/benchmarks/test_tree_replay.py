"""tree_replay.py: a replay gives what decoding with these trees gives."""

import functools

import pytest

from benchmarks.studies.tree_replay import record, replay
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
