"""The tiny recipe with blocks of 8, the fastest on a CPU, which pays for every row of a draft and of its verification.

    python -m domino_jax.train --config=configs/tiny_8.py --workdir=/tmp/domino-8
    python -m domino_jax.decode --config=configs/tiny_8.py --output=/tmp/domino-8-decode

To expect: identical outputs in all three modes, τ of Domino at least 1.05 × its backbone's. Its chain already emits all
9 tokens of many rounds, which leaves little to a tree (docs/tree.md).
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.drafter.path = str(tiny.ASSETS / "tiny_domino_8")
    config.drafter.block_size = 8
    config.train.num_anchors = 48
    config.train.slice_blocks = 48
    config.train.gamma = 4.0  # the public value for blocks of 8

    config.decode.num_drafts = 0  # all 8
    config.decode.cache_length = 384
    config.decode.tree.depth = 0
    config.decode.tree.candidates = 64
    config.decode.tree.beta = -0.3  # of 0 to -0.5 the best at 16 nodes, by a little
    return config
