"""The config.json of the public 8B Domino drafter, and the tensors that servers look for in a drafter's file."""

import dataclasses

from domino_jax.method.config import DrafterConfig

PUBLIC_8B = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "dflash_config": {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "projector_type": "domino",
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    },
}


def public_shapes(raw: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a public drafter of this config.json, as SGLang allocates them, by its name in the file."""
    hidden, inner, width = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    queries, keys = (raw[f"num_{part}_heads"] * width for part in ("attention", "key_value"))
    nested = raw["dflash_config"]
    names = {"fc": (hidden, len(nested["target_layer_ids"]) * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for layer in range(raw["num_hidden_layers"]):
        part = f"layers.{layer}"
        names |= {f"{part}.{norm}_layernorm": (hidden,) for norm in ("input", "post_attention")}
        names |= {f"{part}.self_attn.{norm}_norm": (width,) for norm in "qk"}
        names |= {f"{part}.self_attn.q_proj": (queries, hidden), f"{part}.self_attn.o_proj": (hidden, queries)}
        names |= {f"{part}.self_attn.{matrix}_proj": (keys, hidden) for matrix in "kv"}
        names |= {f"{part}.mlp.{matrix}_proj": (inner, hidden) for matrix in ("gate", "up")}
        names |= {f"{part}.mlp.down_proj": (hidden, inner)}
    names = {f"{name}.weight": shape for name, shape in names.items()}
    if nested.get("projector_type") == "domino":
        state, rank = nested["gru_hidden_dim"], nested["emb_dim"]
        names |= {"prefix_gru.weight_ih_l0": (3 * state, hidden), "prefix_gru.weight_hh_l0": (3 * state, state)}
        names |= {"embed_proj.0.weight": (rank, hidden + state), "embed_proj.2.weight": (raw["vocab_size"], rank)}
    if nested.get("projector_type") == "dspark":
        rank, inputs = nested["markov_rank"], hidden + nested["markov_rank"] * nested["confidence_head_with_markov"]
        names |= {f"markov_head.markov_{matrix}.weight": (raw["vocab_size"], rank) for matrix in ("w1", "w2")}
        gated, rnn = (nested["markov_head_type"] == kind for kind in ("gated", "rnn"))
        if gated:
            names |= {"markov_head.gate_proj.weight": (rank, hidden + rank), "markov_head.gate_proj.bias": (rank,)}
        if rnn:
            names |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + hidden)}
            names |= {"markov_head.joint_proj.bias": (3 * rank,)}
        if nested["enable_confidence_head"]:
            names |= {"confidence_head.proj.weight": (1, inputs), "confidence_head.proj.bias": (1,)}
    return names


def without_head(config: DrafterConfig) -> DrafterConfig:
    """The plain DFlash drafter with the same backbone."""
    return DrafterConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(DrafterConfig)})
