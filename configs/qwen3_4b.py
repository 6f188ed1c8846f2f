"""A Domino drafter for Qwen/Qwen3-4B: the paper's recipe.

    python -m domino_jax.train --config=configs/qwen3_4b.py --workdir=WORKDIR --config.data.train=ROWS.jsonl

ROWS.jsonl holds answers of the target itself; domino_jax.regenerate makes them. 64 of its prompts are held out of the
training and decoded every 5,000 steps; the drafter with the best τ is kept.

To expect: 588.3 M weights in the layout of the public Domino drafter of this size, and τ about 1.2 × that of its
backbone alone, as the paper reports.
"""

from configs import qwen3


def get_config():
    return qwen3.get_config("Qwen/Qwen3-4B")
