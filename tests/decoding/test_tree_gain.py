"""τ of the tiny recipe's chain and trees with the shipped drafter, as docs/decoding.md states it."""

import dataclasses

import pytest

from benchmarks.studies.tree_replay import record, replayed_tau
from configs import tiny
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.acceptance import tau_pooled
from domino_jax.decoding.generate import new_generator
from domino_jax.recipe.values import decode_settings
from domino_jax.weights.loading import load_models, load_target

# Measured: 6.34, 6.79, 7.16 and 6.58, 7.03, 7.46. A near tie that another CPU decides otherwise moves the third digit.
LEAST = {
    0.0: {"chain": 6.2, 16: 6.65, 64: 7.0},
    1.0: {"chain": 6.45, 16: 6.85, 64: 7.3},
}


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("temperature", LEAST)
def test_tau_of_the_chain_and_of_trees_of_16_and_64_nodes(temperature):
    config = tiny.get_config()
    config.decode.modes = ("domino", "tree")
    config.decode.temperature = temperature
    config.decode.draft_sharpness = float("inf")  # as in the table
    settings = decode_settings(config.decode, "domino")
    target = load_target(config.target.path, settings.dtype)
    models = load_models(target, config.drafter.path)
    rows = read_prompts(config.eval.prompts, config.decode.num_prompts)
    prompts = [encode_prompt(target.tokenizer, row, settings.thinking, row["id"]) for row in rows]
    generator = new_generator(models, settings, target.stop_ids)
    answers = generator.generate(models, prompts, "domino").answers
    recordings = record(models, generator, prompts, answers)
    tree = settings.drafting.tree
    trees = {nodes: replayed_tau(recordings, dataclasses.replace(tree, nodes=nodes)) for nodes in (16, 64)}
    measured = {"chain": tau_pooled(answers)} | trees
    assert all(measured[name] >= least for name, least in LEAST[temperature].items()), measured
