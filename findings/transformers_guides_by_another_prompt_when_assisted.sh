#!/usr/bin/env bash
# transformers 5.24.0 with torch 2.13.0 on a CPU, generate(guidance_scale=…) of a causal model.
# Guess: greedy assisted decoding and prompt lookup give the tokens of plain greedy decoding, whatever logits processors
#   are on, or refuse. They do with penalties, biases, n-gram bans and minimum lengths.
# What happens: with classifier-free guidance they give other tokens, without a warning. The guidance holds the cache of
#   its unconditional prompt and adds one token a call. Assisted decoding calls it for each drafted token, also for
#   those that are then rejected, and an assistant model calls the same object, so the cache fills with tokens that are
#   not in the answer. A model that is its own assistant already has another first token.
# Why it matters: an assistant is chosen for speed alone, so nobody compares answers. Here the guided answer is computed
#   from an unconditional context that never existed, and acceptance figures are those of another distribution.
# Output seen: first tokens that agree with the answer computed by hand, of 12: plain 12, prompt lookup 2, own assistant
#   0; without guidance 12, 12, 12.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
install=("$folder/v/bin/pip" install --quiet --disable-pip-version-check)
"${install[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
"${install[@]}" "torch==2.13.0" "transformers==5.24.0"
cat >"$folder/run.py" <<'PY'
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

transformers.utils.logging.set_verbosity_error()
SIZES = dict(vocab_size=12, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, initializer_range=0.3)  # fmt: skip
NEW = 12
torch.set_num_threads(1)
torch.manual_seed(0)
model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()
model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
prompt = torch.tensor([[1, 2, 3, 4, 5, 6]])


@torch.no_grad()
def by_hand(scale):
    """Greedy tokens of u + scale (c - u), both sides computed from their whole rows."""
    with_prompt, without = prompt, prompt[:, -1:]
    for _ in range(NEW):
        c, u = (model(row, use_cache=False).logits[:, -1].log_softmax(-1) for row in (with_prompt, without))
        token = (u + scale * (c - u)).argmax(-1, keepdim=True)
        with_prompt, without = torch.cat([with_prompt, token], 1), torch.cat([without, token], 1)
    return with_prompt[0, -NEW:]


ways = {"plain": {}, "prompt lookup": {"prompt_lookup_num_tokens": 3}, "own assistant": {"assistant_model": model}}
for scale in (1.0, 2.0):
    answer, equal = by_hand(scale), {}
    for name, options in ways.items():
        row = model.generate(prompt, do_sample=False, max_new_tokens=NEW, guidance_scale=scale, **options)[0]
        same = row[-NEW:] == answer
        equal[name] = int(same.long().cumprod(0).sum())
    print(f"guidance {scale}: first tokens that agree with the answer by hand: {equal}")
    assert equal["plain"] == NEW, "the control: plain decoding gives the answer by hand"
    if scale == 1:
        assert set(equal.values()) == {NEW}, "the control: without guidance all ways agree"
    else:
        assert equal["prompt lookup"] < NEW, "prompt lookup now keeps guided answers"
        assert equal["own assistant"] < NEW, "an assistant now keeps guided answers"
PY
"$folder/v/bin/python" "$folder/run.py"
