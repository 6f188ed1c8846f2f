#!/usr/bin/env bash
# google-tunix 0.1.7 with jax 0.10.2, flax 0.12.8 and transformers 5.12.1 on a CPU (jax 0.12.0.1 does the same).
# Guess: padding is what tunix adds on the left of a prompt. All tokens of the prompt itself are read, whatever the
#   tokenizer's pad token is.
# What happens: padding is recognised by its id. A Hugging Face tokenizer without a pad token gets its eos token as one,
#   silently. Every eos inside a prompt then counts as padding: it is masked, and positions do not count it. The logits
#   are those of the prompt without its eos tokens, to the last digits. Tokens and text still show them. The log
#   probabilities that the RL learners compute (compute_per_token_logps) are wrong in the same way. A pad token that is
#   set to eos by hand does the same, and a tokenizer with a pad token of its own is right.
# Why it matters: the instruct tokenizers of the Llama 3 family have no pad token, and their eos ends each turn. So the
#   end of the system's, the user's and all earlier turns is hidden from the model, in generation, in GRPO and in PPO:
#   it is trained on, and judged by, prompts that it gets from no other engine, and where another engine makes the
#   rollouts, its log probabilities are of other prompts than the trainer's. Give the tokenizer an unused token for pad.
# Output seen: largest difference of the first log probabilities to those of the model that is called on the whole
#   prompt, and on the prompt without eos: own pad token 0.00000, 0.88470; no pad token, and pad token set to eos,
#   0.88470, 0.00000. Error of compute_per_token_logps: own pad token 0.0, eos as pad token 0.237.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/v"
"$folder/v/bin/pip" install --quiet --disable-pip-version-check "google-tunix==0.1.7" "jax==0.10.2" "jaxlib==0.10.2" \
    "flax==0.12.8" "qwix==0.1.8" "grain==0.2.18" "datasets==5.2.0" "transformers==5.12.1" "tokenizers==0.22.2" \
    "huggingface_hub==1.33.0" "safetensors==0.7.0"
cat >"$folder/run.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from tunix.generate import sampler
from tunix.models.llama3 import model as llama3
from tunix.rl import common

WORDS = ["<pad>", "<unk>", "<eot>"] + [f"w{number}" for number in range(61)]
PROMPT = "w1 w2 w3 <eot> w4 w5 w6 <eot> w7 w8"
EOT = WORDS.index("<eot>")


def tokenizer(**pad):
    words = models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    fast = Tokenizer(words)
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eot>", unk_token="<unk>", **pad)


config = llama3.ModelConfig(
    num_layers=2,
    vocab_size=len(WORDS),
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)
model = llama3.Llama3(config, rngs=nnx.Rngs(0))
# Embeddings and weights as large as after a training.
nnx.update(model, jax.tree.map(lambda weight: 5 * weight if weight.ndim > 1 else weight, nnx.state(model, nnx.Param)))


def log_probabilities(ids):
    """The model gives them when it reads all tokens at their plain positions."""
    size = len(ids)
    mask = jnp.tril(jnp.ones((1, size, size), bool))
    return jax.nn.log_softmax(model(jnp.array([ids]), jnp.arange(size)[None], None, mask)[0][0])


def difference(a, b):
    return float(jnp.abs(a - b).max())


whole = [WORDS.index(word) for word in PROMPT.split()]
without = [token for token in whole if token != EOT]
right, hidden = log_probabilities(whole)[-1], log_probabilities(without)[-1]
assert difference(right, hidden) > 0.1, "the model does not see the ends of turns"
print("largest difference of the first log probabilities:")
for name, pad in (
    ("own pad token", {"pad_token": "<pad>"}),
    ("no pad token", {}),
    ("pad token set to eos", {"pad_token": "<eot>"}),
):
    cache = sampler.CacheConfig(cache_size=32, num_layers=2, num_kv_heads=2, head_dim=16)
    generate = sampler.Sampler(model, tokenizer(**pad), cache)
    output = generate(PROMPT, max_generation_steps=4, max_prompt_length=16, return_logits=True, eos_tokens=[1])
    assert output.padded_prompt_tokens[0, -len(whole) :].tolist() == whole
    first = jax.nn.log_softmax(output.logits[0][0])
    to_whole, to_without = difference(first, right), difference(first, hidden)
    print(f"  {name}: to the whole prompt {to_whole:.5f}, to the prompt without <eot> {to_without:.5f}")
    if name == "own pad token":
        assert to_whole < 1e-3 < to_without, "the control"
    else:
        assert to_without < 1e-3 < to_whole, "tunix now reads the eos tokens of a prompt"

answer = [30, 31, 32, 33]
right = log_probabilities(whole + answer)[len(whole) - 1 : -1][np.arange(4), np.array(answer)]
definition, state = nnx.split(model)
errors = {}
for name, pad in (("own pad token", 0), ("eos as pad token", EOT)):
    tokens = {"prompt_tokens": jnp.array([whole]), "completion_tokens": jnp.array([answer])}
    seen = common.compute_per_token_logps(definition, state, **tokens, pad_id=pad, eos_id=EOT)
    errors[name] = difference(seen[0], right)
print("error of compute_per_token_logps:", {name: round(error, 5) for name, error in errors.items()})
assert errors["own pad token"] < 1e-3, "the control"
assert errors["eos as pad token"] > 0.05, "log probabilities now see the eos tokens of a prompt"
PY
JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 "$folder/v/bin/python" -W ignore "$folder/run.py" 2>"$folder/log" || {
    tail -20 "$folder/log"
    exit 1
}
