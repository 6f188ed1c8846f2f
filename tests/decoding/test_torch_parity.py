"""Qwen3 targets of any shape equal those of transformers; skipped where torch is not installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.models.qwen3 import Qwen3
from domino_jax.weights.target import load_target
from tests.helpers.models import random_tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "theta": 1e6,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
CASES = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "head_dim is width over heads": {"head_dim": 12},
    "theta 5000": {"theta": 5e3},
    "attention_bias": {"attention_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads as heads": {"num_key_value_heads": 4, "tie_word_embeddings": True, "theta": 25e4},
}


def reference_model(fields, seed=0):
    """A random transformers Qwen3 in float32; kernels of unit gain, so that every part counts."""
    fields = dict(fields)
    rope = {"rope_theta": fields.pop("theta"), "rope_type": "default"}
    config = transformers.Qwen3Config(**fields, rope_parameters=rope, max_position_embeddings=1024)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.normal_(0.0, 0.2)
                weight += 0.0 if name.endswith("bias") else 1.0
            else:
                weight.normal_(0.0, 0.05 if "embed" in name else weight.shape[1] ** -0.5)
    return model


def compare(fields, folder, length):
    """(largest difference of the logits, of the features, largest logit) over one row of `length` tokens."""
    model = reference_model(fields)
    model.save_pretrained(folder)
    config, params = load_target(folder, jnp.float32)
    tokens = random_tokens((1, length), vocab=fields["vocab_size"])
    with torch.no_grad():
        out = model(torch.from_numpy(np.asarray(tokens, np.int64)), output_hidden_states=True)
    taps = tuple(range(config.num_hidden_layers - 1))
    ours = jax.jit(lambda tokens: Qwen3(config).apply({"params": params}, tokens, tap_layers=taps))(tokens)
    # entry 0 of the public tuple is the embedding; the last one is normed and is never tapped
    features = torch.cat(out.hidden_states[1:-1], dim=-1).numpy()
    reference = out.logits.numpy()
    return abs(ours["logits"] - reference).max(), abs(ours["features"] - features).max(), abs(reference).max()


@pytest.mark.parametrize("case", CASES)
def test_target_equals_transformers_on_512_tokens(case, tmp_path):
    logits, features, size = compare({**SMALL, **CASES[case]}, tmp_path, 512)
    assert logits < 1e-4 and features < 1e-4 and size > 1.0
