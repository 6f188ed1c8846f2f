"""is_causal and convolutions: a numpy backbone from the published rules, beside the training and the decoding path.

The rule of z-lab's module: with a window W key and query are less than W apart on either side, for context and block
alike; is_causal true also hides later slots, in every layer; absent, only sliding layers hide them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from domino_jax.method import blocks
from domino_jax.method.pair import TargetRows
from domino_jax.weights import hf
from domino_jax.weights.drafter import load_drafter, save_drafter
from tests.helpers.models import random_tokens, run_blocks, tiny_drafter, tiny_target

FULL, SLIDING = ("full_attention",) * 2, ("full_attention", "sliding_attention")
PLAIN, CONVOLVED = {}, {"conv_kernel_size": 3, "conv_group_size": 8, "input_embedding_scale": 0.5, "head": "dflash2"}
KINDS = [
    (FULL, None, True, PLAIN),
    (FULL, None, False, PLAIN),
    (SLIDING, 3, None, PLAIN),
    (SLIDING, 3, True, PLAIN),
    (SLIDING, 3, False, CONVOLVED),
]
ANCHORS = [1, 5, 11]  # one a row


def normed(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotated(x, positions, theta):
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def visible(query, key, window, causal):
    return (window is None or abs(query - key) < window) and (key <= query or not causal)


class Convolution:
    """The convolution of one part of a layer, with the filters that u [G, D] decides; the identity without tensors."""

    def __init__(self, w, part, u, group):
        self.base = w.get(f"{part}.base_kernel")
        if self.base is not None:
            taps = self.base.shape[1]
            self.filters = (u @ w[f"{part}.kernel_projection.weight"].T).reshape(len(u), 2, taps, -1)
            self.group = group

    def __call__(self, x, side):
        if self.base is None:
            return x
        y = np.zeros_like(x)
        for i, c, tap in np.ndindex(*x.shape, self.base.shape[1]):
            if i >= tap:
                weight = self.base[side, tap, c] + self.filters[i, side, tap, c // self.group]
                y[i, c] += weight * x[i - tap, c]
        return y


def reference(tensors, raw, features, x, start):
    """z [G, D] of one block x [G, D] that begins at `start`, given the features [S, C·D] of its row."""
    eps, theta, width = raw["rms_norm_eps"], raw["rope_theta"], raw["head_dim"]
    nested = raw["dflash_config"]
    channels, x = nested.get("conv_group_size"), x * nested.get("input_embedding_scale", 1.0)
    context = normed(features[:start] @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    positions = np.arange(start + len(x))
    for layer, kind in enumerate(raw["layer_types"]):
        w = {name.split(".", 2)[2]: tensors[name] for name in tensors if name.startswith(f"layers.{layer}.")}
        window = raw["sliding_window"] if kind == "sliding_attention" else None
        causal = raw.get("is_causal", kind == "sliding_attention")
        inner = normed(x, w["input_layernorm.weight"], eps)
        convolve = Convolution(w, "attention_conv", inner, channels)
        inner = convolve(inner, 0)
        q = (inner @ w["self_attn.q_proj.weight"].T).reshape(len(x), -1, width)
        rows = np.concatenate([context, inner])
        k, v = ((rows @ w[f"self_attn.{part}_proj.weight"].T).reshape(len(rows), -1, width) for part in "kv")
        q = rotated(normed(q, w["self_attn.q_norm.weight"], eps), positions[start:], theta)
        k = rotated(normed(k, w["self_attn.k_norm.weight"], eps), positions, theta)
        group = q.shape[1] // k.shape[1]
        out = np.zeros_like(q)
        for slot, head in np.ndindex(q.shape[:2]):
            seen = [key for key in positions if visible(start + slot, key, window, causal)]
            scores = k[seen, head // group] @ q[slot, head] / np.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[slot, head] = weights / weights.sum() @ v[seen, head // group]
        x = x + convolve(out.reshape(len(x), -1) @ w["self_attn.o_proj.weight"].T, 1)
        inner = normed(x, w["post_attention_layernorm.weight"], eps)
        convolve = Convolution(w, "mlp_conv", inner, channels)
        inner = convolve(inner, 0)
        gate = inner @ w["mlp.gate_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * (inner @ w["mlp.up_proj.weight"].T)
        x = x + convolve(hidden @ w["mlp.down_proj.weight"].T, 1)
    return normed(x, tensors["norm.weight"], eps)


@pytest.mark.long
@pytest.mark.parametrize(("layer_types", "window", "is_causal", "changes"), KINDS)
def test_training_and_decoding_follow_what_an_exported_config_states(layer_types, window, is_causal, changes, tmp_path):
    target = tiny_target(tied=False)
    kind = {"layer_types": layer_types, "sliding_window": window, "is_causal": is_causal, **changes}
    drafter = tiny_drafter(target.config, "head" not in changes, **kind)
    save_drafter(tmp_path, drafter.config, drafter.params, "float32")
    tensors, raw = load_file(tmp_path / hf.SINGLE), hf.read_config(tmp_path)
    assert raw.get("is_causal", "absent") == ("absent" if is_causal is None else is_causal)
    assert load_drafter(tmp_path, target.config, "float32")[0] == drafter.config

    tokens, anchors, c = random_tokens((3, 16), seed=4), jnp.array(ANCHORS)[:, None], drafter.config
    trained = run_blocks(target, drafter, tokens, anchors)
    block = blocks.block_tokens(tokens, anchors, jnp.ones((3, 1), bool), c.block_size, c.mask_token_id)[:, 0]
    x = np.asarray(target.module.apply({"params": target.params}, block, method="embed"))
    expected = [reference(tensors, raw, *row) for row in zip(trained["features"], x, ANCHORS, strict=True)]
    np.testing.assert_allclose(trained["z"][:, 0], expected, atol=2e-5)

    @jax.jit
    def decode(features):
        def run(*args, method):
            return drafter.module.apply({"params": drafter.params}, *args, method=method)

        slots = jnp.broadcast_to(jnp.arange(16), (3, 16))
        cache = run(
            drafter.module.init_cache(3, 24), TargetRows(features, count=anchors[:, 0]), slots, method="extend_context"
        )
        return run(cache, x, anchors[:, 0], method="draft_hidden")[0]

    np.testing.assert_allclose(decode(trained["features"]), expected, atol=2e-5)
