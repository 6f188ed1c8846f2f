"""τ of the tiny recipe's chain and trees with the shipped drafter, as docs/decoding.md states it."""

import pytest

from configs import tiny
from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.acceptance import tau_pooled
from domino_jax.decoding.generate import new_generator
from domino_jax.recipe.open_keys import decode_settings
from domino_jax.weights.loading import load_models, load_target

# Measured: chains 6.34 and 6.58, trees of 16 nodes 6.79 and 7.03, of 64 nodes 7.16 and 7.46. A near tie that another
# CPU decides otherwise moves the third digit.
LEAST = {0.0: {"chain": 6.2, 64: 7.0}, 1.0: {"chain": 6.45, 16: 6.85}}


@pytest.mark.slow(minutes=4)
@pytest.mark.parametrize("temperature", LEAST)
def test_tau_of_the_chain_and_of_a_tree(temperature):
    config = tiny.get_config()
    config.decode.modes = ("domino", "tree")
    config.decode.temperature, config.decode.batch_size = temperature, 32
    config.decode.draft_sharpness = float("inf")  # as in the table
    settings = decode_settings(config.decode, "domino")
    target = load_target(config.target.path, settings.dtype)
    models = load_models(target, config.drafter.path)
    rows = read_prompts(config.eval.prompts, config.decode.num_prompts)
    prompts = [TextCodec(target.tokenizer, settings.thinking).encode(row) for row in rows]

    def tau(mode, nodes=16):
        config.decode.tree.nodes = nodes
        generator = new_generator(models, decode_settings(config.decode, "domino"), target.stop_ids)
        return tau_pooled([one.accept_lengths for one in generator.generate(models, prompts, mode).answers])

    for name, least in LEAST[temperature].items():
        assert (tau("domino") if name == "chain" else tau("tree", name)) >= least, name
