"""The tiny recipe with blocks of 16, as published drafters have them: room for chains and trees (docs/tree.md).

    python -m domino_jax.train --config=configs/tiny_tree.py --workdir=/tmp/domino-tree
    python -m domino_jax.decode --config=configs/tiny_tree.py --output=/tmp/domino-tree-decode

To expect: identical outputs in all three modes, τ of the tree at least 1.10 × the chain's. A CPU pays for every row of
a verifying pass: there the shorter blocks of configs/tiny.py are faster, and a chain is faster than a tree.
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.drafter.path = str(tiny.ASSETS / "tiny_domino_16")
    config.drafter.block_size = 16
    config.train.num_anchors = 28
    config.train.attention_slice_blocks = 28  # all of them: the arrays are small
    config.train.gamma = 7.0  # the public value for blocks of 16

    config.decode.modes = ("autoregressive", "domino", "tree")
    config.decode.cache_length = 448  # room for 64 nodes behind the longest prompt
    config.decode.tree.nodes = 16
    config.decode.tree.lanes = 12
    config.decode.tree.candidates = 1024  # of 1,536 tokens: scores are nearly the head's own
    config.decode.tree.beta = -0.1
    return config
