"""The whole of Domino on any CPU: train a drafter for the shipped small Qwen3, then compare three ways of decoding.

    python -m domino_jax.train --config=configs/tiny.py --workdir=/tmp/domino
    python -m domino_jax.decode --config=configs/tiny.py --output=/tmp/domino-decode

train lets the target answer the prompts, trains a drafter on the answers and decodes held-out prompts; about a quarter
of an hour on 2 cores. decode uses the shipped drafter. To expect: identical outputs in all three modes, τ of Domino at
least 1.05 × its backbone's. With mode tree in decode.modes τ is higher still, though not the speed on a CPU
(docs/tree.md). configs/tiny_8.py has blocks of 8, the fastest here.
"""

import pathlib

from configs import qwen3

ASSETS = pathlib.Path(__file__).resolve().parents[1] / "assets"


def get_config():
    config = qwen3.get_config(str(ASSETS / "tiny_qwen3"))
    config.target.dtype = "float32"  # a CPU computes float32 faster, and outputs are compared token by token

    config.drafter.path = str(ASSETS / "tiny_domino")
    config.drafter.num_layers = 3
    config.drafter.block_size = 16  # as published drafters have them: room for chains and trees
    config.drafter.gru_hidden_dim = 128
    config.drafter.emb_dim = 64
    config.drafter.target_layer_ids = (1, 6, 11, 16, 21)  # more taps than draft layers: the fusion of them is cheap

    config.data.train = str(ASSETS / "tiny_qwen3" / "prompts_train.jsonl")
    config.data.regenerate = True
    config.data.held_out = 0  # the prompts to judge by are named below
    config.data.max_length = 224  # cuts one row in twenty; a step costs what its padded rows cost

    config.train.steps = 900
    config.train.batch_size = 8
    config.train.log_every = 20
    config.train.num_anchors = 28
    config.train.slice_blocks = 28  # all of them: the arrays are small
    config.train.gamma = 7.0  # the public value for blocks of 16
    # Decoded τ after the same 300 steps with blocks of 8: 2.5 with Muon at 5e-3, 1.5 with AdamW at 4e-3.
    config.train.optimizer = "muon"
    config.train.learning_rate = 6e-3

    config.checkpoint.every = 300

    config.eval.prompts = str(ASSETS / "tiny_qwen3" / "prompts_heldout.jsonl")
    config.eval.num_prompts = 16
    config.eval.batch_size = 1
    config.eval.every = 300
    config.eval.final = True

    config.decode.prompts = str(ASSETS / "tiny_qwen3" / "prompts_heldout.jsonl")
    config.decode.num_prompts = 64
    config.decode.max_new_tokens = 160
    config.decode.dtype = "float32"
    config.decode.num_drafts = 8  # of 16: a CPU pays for every row of a verifying pass
    config.decode.tree.nodes = 16
    config.decode.tree.depth = 16  # all that the block gives
    config.decode.tree.lanes = 12
    config.decode.tree.candidates = 1024  # of 1,536 tokens: scores are nearly the head's own
    config.decode.tree.beta = -0.1
    # What such a pass has to compute is less than what it costs to hand halves of it from core to core: on the two of
    # an Intel Xeon plain decoding ran at 603 tokens/s and Domino at 785, on one of them at 775 and 1,074.
    config.decode.cores = 1
    config.decode.cache_length = 448  # room for 64 nodes after the longest prompt, which has 204 tokens

    config.regenerate.num_prompts = 1_600
    config.regenerate.batch_size = 32
    config.regenerate.max_new_tokens = 160
    config.regenerate.temperature = 0.0  # the tasks have one right answer
    config.regenerate.top_k = 0
    config.regenerate.top_p = 1.0
    return config
