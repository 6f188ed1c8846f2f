"""A Domino drafter for Qwen/Qwen3-30B-A3B, a mixture of experts: the paper's recipe.

    python -m domino_jax.train --config=configs/qwen3_30b_a3b.py --workdir=WORKDIR --config.data.train=ROWS.jsonl

ROWS.jsonl holds answers of the target itself; domino_jax.regenerate makes them. 64 of its prompts are held out of the
training and decoded every 5,000 steps; the drafter with the best τ is kept.

Qwen's FP8 folder, which is another target, has the same recipe: --config.target.path=Qwen/Qwen3-30B-A3B-FP8. The Coder
of this size too: Qwen/Qwen3-Coder-30B-A3B-Instruct.

To expect: 353.2 M weights in five dense layers. A step of the target reads 3.3 of its 30.5 billion weights, and a round
many more. Whether that pays on a device can be seen before the training:

    python -m domino_jax.decode --config=configs/qwen3_30b_a3b.py --dry_run --topology=h200
"""

from configs import qwen3


def get_config():
    return qwen3.get_config("Qwen/Qwen3-30B-A3B")
