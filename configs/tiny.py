"""The whole of Domino on any CPU: train a drafter for the shipped small Qwen3, then compare three ways of decoding.

    python -m domino_jax.train --config=configs/tiny.py --workdir=/tmp/domino
    python -m domino_jax.decode --config=configs/tiny.py --output=/tmp/domino-decode

train lets the target answer the prompts, trains a drafter on the answers and decodes held-out prompts. To expect:
identical outputs in all three modes, τ of Domino about 4.8, its backbone's 3.7. decode uses the shipped drafter (τ 6.34
and 4.89), which comes from about three times the training:

    python -m domino_jax.train --config=configs/tiny.py --workdir=DIR \\
        --config.regenerate.num_prompts=1600 --config.regenerate.max_new_tokens=160 --config.data.layout=pad \\
        --config.train.steps=900 --config.train.batch_size=8 --config.train.num_anchors=48

Mode tree in decode.modes raises τ further, but not the speed on a CPU (docs/decoding.md). Models of this size decode
faster with one thread, which decode chooses: handing halves of a pass from core to core costs more than it saves.
On two cores of an Intel Xeon plain decoding ran at 603 tokens/s and Domino at 785, on one at 775 and 1,074.
"""

import pathlib

from configs import qwen3

ASSETS = pathlib.Path(__file__).resolve().parents[1] / "assets"


def get_config():
    config = qwen3.get_config(str(ASSETS / "tiny_qwen3"))
    config.target.dtype = "float32"  # a CPU computes float32 faster, and outputs are compared token by token

    config.drafter.path = str(ASSETS / "tiny_domino")
    config.drafter.num_layers = 3
    config.drafter.block_size = 8  # a CPU pays for every row of a draft and of its verification
    config.drafter.domino.gru_hidden_dim = 128
    config.drafter.domino.emb_dim = 64
    config.drafter.dflash2.rank = 64  # two tables of 1,536 tokens
    config.drafter.target_layer_ids = (1, 6, 11, 16, 21)  # more taps than draft layers: the fusion of them is cheap

    config.data.train = str(ASSETS / "tiny_qwen3" / "prompts_train.jsonl")
    config.data.regenerate = True
    config.data.max_length = 224  # cuts one row in eighteen; packs of this length are 85 % text
    config.data.layout = "pack"  # rows average 137 tokens: padded to 224 each, 61 % of a batch would be text

    config.train.steps = 700
    # At equal computing time many small steps train better than fewer large ones: 320 steps of 3 packs with 40 anchors
    # reached a loss of 2.70, 140 steps of 5 packs with 77 anchors 3.76. Four packs can be cut over 4 devices.
    config.train.batch_size = 4
    config.train.num_anchors = 32
    config.train.log_every = 20
    config.train.gamma = 4.0  # the public value for blocks of 8
    # Decoded τ after the same 300 steps: 2.5 with Muon at 5e-3, 1.5 with AdamW at 4e-3.
    config.train.optimizer = "muon"
    config.train.learning_rate = 6e-3

    config.checkpoint.every = 350

    config.eval.prompts = str(ASSETS / "tiny_qwen3" / "prompts_heldout.jsonl")
    config.eval.num_prompts = 16
    config.eval.every = 350
    config.eval.final = True

    config.decode.num_prompts = 64
    config.decode.max_new_tokens = 160
    config.decode.dtype = "float32"
    config.decode.head_candidates = 0  # the head's matrix of 1,536 tokens stays in a CPU's cache
    config.decode.tree.nodes = 16
    config.decode.tree.lanes = 12
    config.decode.tree.beta = -0.3  # of 0 to -0.5 the best at 16 nodes, by a little
    config.decode.cache_length = 448  # room for 64 nodes after the longest prompt, which has 204 tokens

    config.serve.batch_size = 8

    config.regenerate.num_prompts = 1_000
    config.regenerate.batch_size = 32
    config.regenerate.max_new_tokens = 128  # cuts one answer in ninety
    config.regenerate.temperature = 0.0  # the tasks have one right answer
    config.regenerate.top_k = 0
    config.regenerate.top_p = 1.0
    return config
