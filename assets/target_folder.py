"""A target as a public folder: the counterpart of weights/target.py, for the models that are made here."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.runtime.json_files import write_json
from domino_jax.weights import hf
from domino_jax.weights.target import Params, file_tensors, target_table


def target_config_dict(config: Qwen3Config, dtype: str) -> dict[str, Any]:
    """The public config.json of a target: rope_theta in both places, so that both transformers generations read it."""
    fields = dataclasses.asdict(config)
    if fields.pop("qk_norm"):  # implied by the model_type; there is no public key for it
        public = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "layer_types": ["full_attention"] * config.num_hidden_layers,
            "max_window_layers": config.num_hidden_layers,
            "sliding_window": None,
            "use_sliding_window": False,
        }
    else:
        public = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False, "pretraining_tp": 1}
    return {
        **public,
        **fields,
        "attention_dropout": 0.0,
        "dtype": dtype,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "use_cache": True,
    }


def save_target(
    folder: str | Path,
    config: Qwen3Config,
    params: Params,
    dtype: str = "bfloat16",
    *,
    token_ids: Mapping[str, Any] | None = None,
) -> None:
    """Writes a target as a public folder.

    token_ids: bos_token_id, eos_token_id, pad_token_id for config.json; with them a generation_config.json is written.

    Every array must be readable by this process: on several hosts, gather the parameters first and write from one.
    """
    tokens = dict(token_ids or {})
    raw = {**target_config_dict(config, np.dtype(dtype).name), **tokens}
    if tokens:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_json(Path(folder, "generation_config.json"), tokens)
    hf.write_folder(folder, file_tensors(target_table(config), params, dtype), raw)
