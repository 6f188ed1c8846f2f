"""Llama-type targets: the same decoder without norms on queries and keys, against a reference and transformers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from assets.target_folder import save_target
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.runtime.errors import DataError
from domino_jax.weights import hf
from domino_jax.weights.target import load_target
from tests.helpers.models import TARGET_FIELDS, Model, random_params, random_tokens

# No head_dim: 32 / 4.
FIELDS = {name: value for name, value in TARGET_FIELDS.items() if name != "head_dim"}
FIELDS |= {"model_type": "llama", "rms_norm_eps": 1e-5}


def read(**changes) -> Qwen3Config:
    fields = {**FIELDS, **changes}
    return Qwen3Config.from_dict({key: value for key, value in fields.items() if value != "absent"})


@functools.lru_cache
def llama(tied: bool = True, head_dim: int | None = None, attention_bias: bool = False) -> Model:
    config = read(tie_word_embeddings=tied, head_dim=head_dim, attention_bias=attention_bias)
    module = Qwen3(config)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    return Model(config, module, random_params(shapes, 3))


# ---- the forward pass ------------------------------------------------------------------------------------------------


def normed(x, scale, eps):
    return scale * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def rotated(x, theta):
    """x [T, H]: pairs (i, i + H/2) turned by position · theta^(-2i/H)."""
    half = x.shape[1] // 2
    out = np.empty_like(x)
    for position in range(len(x)):
        for i in range(half):
            angle = position * theta ** (-i / half)
            a, b = x[position, i], x[position, i + half]
            out[position, i] = a * np.cos(angle) - b * np.sin(angle)
            out[position, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out


def reference(config: Qwen3Config, params: dict, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Llama over one row int [T], in float64 and with loops: (logits [T, V], each layer's output [T, D])."""
    c, p = config, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = p["embed_tokens"]["embedding"][tokens]
    length, outputs = len(tokens), []
    for index in range(c.num_hidden_layers):
        layer = p[f"layers_{index}"]
        attention, mlp = layer["self_attn"], layer["mlp"]
        y = normed(x, layer["input_layernorm"]["scale"], c.rms_norm_eps)
        q, k, v = (
            (y @ attention[name]["kernel"] + attention[name].get("bias", 0.0)).reshape(length, -1, c.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        heads = []
        for head in range(c.num_attention_heads):
            group = head * c.num_key_value_heads // c.num_attention_heads
            scores = rotated(q[:, head], c.rope_theta) @ rotated(k[:, group], c.rope_theta).T / np.sqrt(c.head_dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, group])
        out = attention["o_proj"]
        x = x + np.concatenate(heads, axis=-1) @ out["kernel"] + out.get("bias", 0.0)
        y = normed(x, layer["post_attention_layernorm"]["scale"], c.rms_norm_eps)
        gate = y @ mlp["gate_proj"]["kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up_proj"]["kernel"])) @ mlp["down_proj"]["kernel"]
        outputs.append(x)
    head = p["embed_tokens"]["embedding"].T if c.tie_word_embeddings else p["lm_head"]["kernel"]
    return normed(x, p["norm"]["scale"], c.rms_norm_eps) @ head, outputs


CASES = {"tied": {}, "untied, head_dim 12, biases": {"tied": False, "head_dim": 12, "attention_bias": True}}


@pytest.mark.parametrize("case", CASES)
def test_a_llama_target_equals_a_reference_with_loops(case):
    config, module, params = llama(**CASES[case])
    tokens = random_tokens((1, 9))
    ours = jax.jit(lambda tokens: module.apply({"params": params}, tokens, tap_layers=(0, 1)))(tokens)
    logits, outputs = reference(config, params, np.asarray(tokens[0]))
    assert abs(logits).max() > 1.0
    np.testing.assert_allclose(ours["logits"][0], logits, rtol=0, atol=1e-4)
    np.testing.assert_allclose(ours["features"][0], np.concatenate(outputs[:2], axis=-1), rtol=0, atol=1e-4)


# ---- config.json -----------------------------------------------------------------------------------------------------


def test_an_absent_head_dim_is_width_over_heads_for_llama():
    assert read().head_dim == 8
    assert read(head_dim=None).head_dim == 8
    assert read(head_dim=12).head_dim == 12


def test_an_absent_head_dim_is_refused_for_qwen3():
    with pytest.raises(DataError, match="lacks head_dim"):
        read(model_type="qwen3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "absent"}, "lacks hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads 0; expected"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RoPE scaling"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "rope_scaling.partial_rotary_factor",
        ),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with .*'sliding_attention'"),
        ({"sliding_window": 4, "use_sliding_window": True}, "use_sliding_window True"),
        ({"rope_theta": "absent"}, "rope_theta"),
        ({"model_type": "mistral"}, "'mistral'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_means_another_model_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        read(**changes)


def test_keys_with_the_values_that_change_nothing_are_accepted():
    neutral = {"partial_rotary_factor": 1.0, "mlp_bias": False}
    rope = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}}
    assert read(layer_types=["full_attention"] * 2, sliding_window=4, **neutral, **rope) == read()


# ---- folders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_llama_target_written_and_read_is_the_same(case, tmp_path):
    config, _, params = llama(**CASES[case])
    save_target(tmp_path, config, params, "float32", token_ids={"eos_token_id": 2})
    again_config, again = load_target(tmp_path, "float32")
    assert again_config == config
    jax.tree.map(np.testing.assert_array_equal, params, again)
    raw = hf.read_config(tmp_path)
    assert (raw["model_type"], raw["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert not {"qk_norm", "sliding_window", "layer_types"} & set(raw)
