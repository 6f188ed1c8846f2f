"""A Domino drafter for Qwen/Qwen3-1.7B: the paper's recipe.

    python -m domino_jax.train --config=configs/qwen3_1_7b.py --workdir=WORKDIR --config.data.train=ROWS.jsonl

ROWS.jsonl holds answers of the target itself; domino_jax.regenerate makes them. 64 of its prompts are held out of the
training and decoded every 5,000 steps; the drafter with the best τ is kept.

To expect: no published drafter of this size exists to compare with; τ (tokens per verification) about 1.2 × that of the
backbone alone, as the paper sees on 4B and 8B.
"""

from configs import qwen3


def get_config():
    return qwen3.get_config("Qwen/Qwen3-1.7B")
