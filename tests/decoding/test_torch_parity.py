"""Parity with the public PyTorch modules themselves; skipped where torch is not installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from domino_jax.method.heads.domino import GRU
from domino_jax.models.qwen3 import Qwen3
from domino_jax.weights.drafter import save_drafter
from domino_jax.weights.target import load_target
from tests.helpers.models import random_tokens, run_blocks, tiny_drafter, tiny_target

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
    print(f"{case}: logits {logits:.1e}, features {features:.1e}, largest logit {size:.1f}")
    assert logits < 1e-4
    assert features < 1e-4
    assert size > 1.0


def gru_pair(order=(0, 1, 2)):
    """Our states and torch's over 12 tokens, with torch's gate rows given to us in `order`."""
    torch.manual_seed(0)
    reference = torch.nn.GRU(24, 16, bias=False, batch_first=True)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.normal_(0.0, 0.6)
    x = torch.randn(3, 12, 24)
    weights = [getattr(reference, name).detach().numpy() for name in ("weight_ih_l0", "weight_hh_l0")]
    ih, hh = (np.concatenate([np.split(weight, 3)[gate] for gate in order]).T for weight in weights)
    params = {"params": {"weight_ih": jnp.asarray(ih), "weight_hh": jnp.asarray(hh)}}
    gru = GRU(24, 16)
    gates = gru.apply(params, jnp.asarray(x.numpy()), method="input_gates")
    state, states = jnp.zeros((3, 16)), []
    for slot in range(12):
        state = gru.apply(params, state, gates[:, slot], method="advance")
        states.append(state)
    with torch.no_grad():
        return np.stack(states, axis=1), reference(x)[0].numpy()


def test_gru_equals_torch_gru():
    ours, reference = gru_pair()
    print(f"GRU {abs(ours - reference).max():.1e}")
    np.testing.assert_allclose(ours, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shift_label", [True, False], ids=["shifted", "unshifted"])
def test_specforge_loads_our_export_and_agrees(shift_label, tmp_path):
    """One block at anchor 7 through SpecForge's Domino module, loaded from a folder that we wrote."""
    domino = pytest.importorskip("specforge.modeling.draft.domino")
    target = tiny_target()
    drafter = tiny_drafter(target.config, shift_label)
    anchor, size = 7, drafter.config.block_size
    tokens = random_tokens((1, 16))
    ours = run_blocks(target, drafter, tokens, [[anchor]])
    save_drafter(tmp_path, drafter.config, drafter.params, "float32")
    module = domino.DominoDraftModel.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()

    table = torch.from_numpy(np.array(target.params["embed_tokens"]["embedding"]))
    block = torch.full((1, size), drafter.config.mask_token_id)
    block[0, 0] = int(tokens[0, anchor])
    consumed = torch.from_numpy(np.array(tokens[:, anchor : anchor + size], np.int64))
    with torch.no_grad():
        z = module(
            position_ids=torch.arange(anchor + size)[None],
            noise_embedding=table[block],
            target_hidden=torch.from_numpy(np.array(ours["features"][:, :anchor])),
            attention_mask=torch.ones(1, 1, size, anchor + size, dtype=torch.bool),
        )
        base = (z @ table.T)[:, None]
        final = module.apply_logits_head(base, prev_token_embeddings=table[consumed][:, None], hidden_states=z[:, None])
    print(f"z {abs(z.numpy() - ours['z'][:, 0]).max():.1e}, final {abs(final.numpy() - ours['final']).max():.1e}")
    np.testing.assert_allclose(z.numpy(), ours["z"][:, 0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(final.numpy(), ours["final"], rtol=0, atol=1e-4)
