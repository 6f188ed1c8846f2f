#!/usr/bin/env bash
# nvidia-modelopt 0.47.0 with transformers 5.14.1 and torch 2.13.0 on a CPU; drafters for a Qwen3 target.
# Guess: the config.json that modelopt exports states the RoPE base with which the drafter was trained.
# What happens: transformers 5 keeps rope_theta in rope_parameters, where modelopt looks for it when it exports and not
#   when it builds the drafter. The drafter's own config then has the default: it trains at base 10,000, and its
#   config.json states the target's.
# Why it matters: an engine turns queries and keys by another angle than the training. Nothing fails; τ is low.
# Output seen: dflash, domino and dspark: trained at 10000, written 1000000.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
install=("$folder/v/bin/pip" install --quiet --disable-pip-version-check)
"${install[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
"${install[@]}" "torch==2.13.0" "transformers==5.14.1" "nvidia-modelopt==0.47.0" requests
cat >"$folder/run.py" <<'PY'
import copy
import json
import pathlib
import sys

import modelopt.torch.speculative as speculative
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

THETA, HEAD_DIM = 1e6, 8
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
             num_key_value_heads=2, head_dim=HEAD_DIM)  # fmt: skip
HEADS = {
    "dflash": {},
    "domino": {"projector_type": "domino", "emb_dim": 8, "gru_hidden_dim": 16},
    "dspark": {"projector_type": "dspark", "markov_rank": 8, "markov_head_type": "vanilla"},
}
torch.set_num_threads(1)
target = Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": THETA}))
for name, head in HEADS.items():
    model = copy.deepcopy(target)
    shape = {"num_hidden_layers": 2, "head_dim": HEAD_DIM, **head}
    config = {"dflash_block_size": 8, "dflash_mask_token_id": 63, "dflash_architecture_config": shape}
    speculative.convert(model, {"algorithm": "dflash", "config": config})
    model.dflash_module._maybe_init_rotary_emb(device=torch.device("cpu"))  # as its first forward does
    trained = round(float(model.dflash_module.rotary_emb.inv_freq[1]) ** (-HEAD_DIM / 2))
    folder = pathlib.Path(sys.argv[1], name)
    model.get_exporter().export(folder)
    written = round(json.loads((folder / "config.json").read_text())["rope_theta"])
    print(f"{name}: trained at {trained}, written {written}")
    assert (trained, written) == (10_000, THETA), "modelopt has changed"
PY
"$folder/v/bin/python" "$folder/run.py" "$folder"
