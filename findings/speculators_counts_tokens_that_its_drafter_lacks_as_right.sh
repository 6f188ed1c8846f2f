#!/usr/bin/env bash
# speculators 0.9.0 with transformers 5.19.0 and torch 2.13.0 on a CPU; a DFlash drafter with a reduced vocabulary.
# Guess: the training's metrics full_acc, position_N_acc and eal (expected accepted length) compare drafted tokens with
#   the target's. A place whose token is outside of the draft vocabulary counts as wrong, or at least not at all.
# What happens: the target's head is cut to the draft vocabulary before its largest logit is taken. The drafted token is
#   compared with the best token that the drafter has, so such a place can count as right. An engine rejects it. With a
#   smaller vocabulary eal stays what it was, while the length that an engine accepts falls.
# Why it matters: eal is the headline metric that ranks runs, and it does not see what a draft vocabulary costs. A
#   vocabulary counted on other text than one serves looks as good as the right one. EAGLE-3, DSpark and the others take
#   their targets from the same cut head, and the confidence head of DSpark learns from it.
# Output seen: draft vocabulary, its share of the target's tokens, eal, accepted length: 64, 100%, 3.83, 3.83; 16, 89%,
#   3.86, 3.16; 4, 46%, 3.72, 1.81.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
install=("$folder/v/bin/pip" install --quiet --disable-pip-version-check)
"${install[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu"
"${install[@]}" "torch==2.13.0" "transformers==5.19.0" "datasets==5.1.0" "openai==3.57.0" "loguru==0.7.3" \
    "pydantic-settings==2.16.3" "typer==0.29.2" "psutil==7.2.2"
"${install[@]}" --no-deps "speculators==0.9.0" "hs-connectors==0.9.0"
cat >"$folder/run.py" <<'PY'
import copy
import pathlib
import sys

import torch
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash.metrics import compute_metrics
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB, LENGTH, BLOCK, ANCHORS, STEPS = 64, 192, 4, 64, 150
torch.set_num_threads(1)
torch.manual_seed(0)
config = Qwen3Config(vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=3,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.3,
                     tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip
target = Qwen3ForCausalLM(config).eval()
path = pathlib.Path(sys.argv[1], "target")
target.save_pretrained(path)
with torch.no_grad():
    ids = target.generate(torch.tensor([[1]]), do_sample=True, top_k=0, max_new_tokens=LENGTH - 1)
    assert ids.shape == (1, LENGTH)
    seen = target(ids, output_hidden_states=True)
    states = []
    hook = target.model.norm.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    target(ids)
    hook.remove()
greedy = seen.logits[0].argmax(-1)
batch = {
    "hidden_states": torch.cat(seen.hidden_states[1:3], -1).float(),
    "input_ids": ids,
    "loss_mask": torch.ones_like(ids),
    "verifier_last_hidden_states": states[0].float(),
    "document_ids": torch.zeros_like(ids),
}
counts = dict(zip(*(part.tolist() for part in greedy.unique(return_counts=True))))


def train(size):
    """(eal of the training, accepted length with the target's own tokens, share of these that the drafter has)."""
    torch.manual_seed(1)
    d2t, t2d = build_vocab_mappings_from_distribution(counts, size, VOCAB)
    layer = copy.deepcopy(config)
    layer.num_hidden_layers, layer.layer_types = 1, ["full_attention"]
    model = DFlashDraftModel.from_training_args(
        layer, t2d=t2d, d2t=d2t, draft_vocab_size=size, block_size=BLOCK, verifier_name_or_path=str(path),
        target_layer_ids=[1, 2], mask_token_id=0, draft_attn_impl="eager",
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    losses = resolve_loss_config("ce", "eager")
    for _ in range(STEPS):
        _, loss, metrics = model(**batch, loss_config=losses, max_anchors=ANCHORS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        torch.manual_seed(2)
        metrics = model(**batch, loss_config=losses, max_anchors=ANCHORS)[2]
        torch.manual_seed(2)
        _, logits, targets, mask, places = model._backbone_forward(**batch, max_anchors=ANCHORS)
        again = compute_metrics(logits, targets, mask, BLOCK, loss_config=losses)[1]
    eal = float(metrics["eal_sum"] / metrics["eal_total"])
    assert eal == float(again["eal_sum"] / again["eal_total"]), "the control: these are the places of the metric"
    drafted = logits[0].argmax(-1)
    drafted = drafted + d2t[drafted] if size < VOCAB else drafted
    right = (drafted == greedy[places - 1]).view(-1, BLOCK)[:, 1:]
    return eal, float(right.float().cumprod(1).sum(1).mean() + 1), float(t2d[greedy].float().mean())


results = {size: train(size) for size in (VOCAB, 16, 4)}
for size, (eal, accepted, share) in results.items():
    print(f"draft vocabulary {size}, {share:.0%} of the target's tokens: eal {eal:.2f}, accepted length {accepted:.2f}")
whole, small = results[VOCAB], results[4]
assert abs(whole[0] - whole[1]) < 1e-5, "the control: with the whole vocabulary eal is the accepted length"
assert small[1] < whole[1] - 1, "the control: an engine accepts fewer tokens of a small vocabulary"
assert small[0] > small[1] + 1, "eal no longer counts tokens that the drafter lacks as right"
PY
LOGURU_LEVEL=ERROR "$folder/v/bin/python" -W ignore "$folder/run.py" "$folder"
