"""Replaying trees over texts that are there gives what decoding with these trees gives."""

import dataclasses
import functools

import pytest

from domino_jax.decoding.settings import SamplingParams, TreeSettings
from domino_jax.evals.tree_replay import record, replay, replayed_tau
from tests.helpers.decoding_models import golden_models, make_generator
from tests.helpers.models import load_golden

TREE = TreeSettings(nodes=12, lanes=4, candidates=16, beta=-0.1)
GOLDEN = "tied_shift"


@functools.lru_cache
def recorded(temperature: float, draft_scale: float | None):
    prompts = [row["prompt"] for row in load_golden(GOLDEN).figures["generate"]][:3]
    shape = {"cache_slots": 96, "max_new_tokens": 24, "sampling": SamplingParams(temperature)}
    made = make_generator(golden_models(GOLDEN), tree=dataclasses.replace(TREE, draft_scale=draft_scale), **shape)
    looped = made.generate(prompts, "tree")
    return made, prompts, looped, record(made.models, made.generator, prompts, looped)


@pytest.mark.parametrize(("temperature", "draft_scale"), [(0.0, None), (0.9, 1.5)])
def test_a_replay_emits_what_the_loop_emits(temperature, draft_scale):
    _, _, looped, recordings = recorded(temperature, draft_scale)
    assert [replay(recording, TREE) for recording in recordings] == [answer.accept_lengths for answer in looped]
    assert max(length for answer in looped for length in answer.accept_lengths) > 2


def test_more_nodes_never_accept_less_of_a_text_and_one_draft_can_at_most_be_two_tokens():
    _, _, looped, recordings = recorded(0.0, None)
    by_size = [replayed_tau(recordings, dataclasses.replace(TREE, nodes=nodes)) for nodes in (2, 6, 12, 24)]
    assert by_size[0] <= 2 and by_size[0] < by_size[-1]
    for recording, answer in zip(recordings, looped, strict=True):
        assert 1 + sum(replay(recording, TREE)) == len(answer.token_ids)


def test_an_answer_of_one_token_has_no_rounds():
    made, prompts, looped, _ = recorded(0.0, None)
    short = dataclasses.replace(looped[0], token_ids=looped[0].token_ids[:1])
    [recording] = record(made.models, made.generator, prompts[:1], [short])
    assert replay(recording, TREE) == [] and replayed_tau([recording], TREE) == 0.0
