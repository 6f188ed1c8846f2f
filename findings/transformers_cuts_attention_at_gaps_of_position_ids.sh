#!/usr/bin/env bash
# transformers 5.24.0 with torch 2.13.0 on a CPU, Qwen3; the attention kinds sdpa and eager.
# Guess: position_ids set the angles of the rotary embedding and nothing else. A causal model without an attention mask
#   attends over the whole row, and a mask of ones changes nothing.
# What happens: without a mask and without a cache, every step of the positions that is not exactly +1 starts a new
#   sequence, and attention does not cross it. With positions 0, 2, 4, … each token sees itself alone, so the last
#   token's logits no longer depend on the first token. With a mask of ones, or with the default use_cache=True, the
#   same ids and positions give full attention.
# Why it matters: stretched or skipped positions, and the equal positions of a draft tree, lose their context without a
#   warning. The other way round, rows packed by restarting positions are kept apart under just these two conditions:
#   with the default use_cache=True, or with the tokenizer's mask, the packed sequences see each other. A 4D mask states
#   what is meant.
# Output seen: change of the last logits by the first token, sdpa and eager: positions +1 0.04; positions +2 0.0, with a
#   mask of ones 0.038, with a cache 0.038; two packed sequences 0.0, with a mask of ones 0.04, with a cache 0.04.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
install=("$folder/v/bin/pip" install --quiet --disable-pip-version-check)
"${install[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
"${install[@]}" "torch==2.13.0" "transformers==5.24.0"
cat >"$folder/run.py" <<'PY'
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8)  # fmt: skip
LENGTH = 12
torch.set_num_threads(1)


@torch.no_grad()
def effect(model, positions, **options):
    """How much the last token's logits move when the first token becomes another."""
    ids = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % 64
    a, b = (model(row, position_ids=positions, **options).logits[0, -1] for row in (ids, other))
    return float((a - b).abs().max())


for kind in ("sdpa", "eager"):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, attn_implementation=kind)).eval()
    ones = torch.ones(1, LENGTH, dtype=torch.long)
    for name, positions in {
        "one by one": torch.arange(LENGTH)[None],
        "by twos": 2 * torch.arange(LENGTH)[None],
        "packed": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]),
        "tree": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9]]),
    }.items():
        seen = {
            "bare": effect(model, positions, use_cache=False),
            "mask of ones": effect(model, positions, use_cache=False, attention_mask=ones),
            "cache": effect(model, positions),
        }
        print(kind, name, {key: round(value, 3) for key, value in seen.items()})
        whole = seen["mask of ones"]
        assert whole > 1e-3, "the control: with a mask the first token matters"
        assert abs(seen["cache"] - whole) < 1e-5, "positions now also cut attention where a cache is used"
        if name == "one by one":
            assert abs(seen["bare"] - whole) < 1e-5
        else:
            assert seen["bare"] == 0, "gaps of position_ids no longer cut the attention"
PY
"$folder/v/bin/python" "$folder/run.py"
