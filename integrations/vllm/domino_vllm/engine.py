"""What this plug-in uses of vLLM. Another version, or one with other names or parameters, is refused."""

import functools
import importlib
import inspect
from typing import Any

VERSIONS = ("0.32", "0.33")
DFLASH_MODEL = "model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"
PROPOSER = "v1.spec_decode.dflash:DFlashProposer"  # of the runner that CPUs pick
SPECULATOR = "v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"  # of the runner that GPUs pick
# By module and name, with the parameters there, which are the same in VERSIONS.
USED = {
    "config.speculative:SpeculativeConfig.hf_config_override": ("hf_config",),
    "model_executor.models.registry:ModelRegistry.register_model": ("model_arch", "model_cls"),
    f"{DFLASH_MODEL}.__init__": ("self", "vllm_config", "prefix"),
    f"{DFLASH_MODEL}.load_weights": ("self", "weights"),
    f"{DFLASH_MODEL}.compute_logits": ("self", "hidden_states"),
    f"{DFLASH_MODEL}.embed_input_ids": ("self", "input_ids", "multimodal_embeddings", "is_multimodal"),
    f"{PROPOSER}.__init__": ("self", "vllm_config", "device", "runner"),
    f"{PROPOSER}._sample_draft_tokens": ("self", "hidden_states", "sampling_metadata"),
    f"{PROPOSER}.set_inputs_first_pass": (
        *("self", "target_token_ids", "next_token_ids", "target_positions", "target_hidden_states"),
        *("token_indices_to_sample", "cad", "num_rejected_tokens_gpu"),
    ),
    f"{SPECULATOR}.__init__": ("self", "vllm_config", "device"),
    f"{SPECULATOR}._generate_draft": (
        *("self", "num_reqs", "num_tokens_padded", "attn_metadata", "slot_mappings"),
        *("num_tokens_across_dp", "cudagraph_runtime_mode"),
    ),
    f"{SPECULATOR}._run_model": (
        *("self", "num_tokens", "attn_metadata", "slot_mappings"),
        *("num_tokens_across_dp", "cudagraph_runtime_mode"),
    ),
}


def look_up(name: str) -> Any:
    """What "module:name.name" is in the installed vLLM."""
    module, _, rest = name.partition(":")
    return functools.reduce(getattr, rest.split("."), importlib.import_module(f"vllm.{module}"))


def differences() -> list[str]:
    """One clause for each name of USED that the installed vLLM lacks or defines with other parameters."""
    clauses = []
    for name, expected in USED.items():
        try:
            actual = tuple(inspect.signature(look_up(name)).parameters)
        except (ImportError, AttributeError):
            clauses.append(f"{name} is missing")
            continue
        if actual != expected:
            clauses.append(f"{name} has the parameters ({', '.join(actual)}) instead of ({', '.join(expected)})")
    return clauses


def check() -> None:
    """Raises RuntimeError unless the installed vLLM is one of VERSIONS and has all of USED."""
    import vllm

    known = " and ".join(VERSIONS)
    change = "Install one of these, uninstall domino-vllm, or leave it out with VLLM_PLUGINS."
    if ".".join(vllm.__version__.split(".")[:2]) not in VERSIONS:
        raise RuntimeError(f"domino-vllm was made for vLLM {known}, and this is {vllm.__version__}. {change}")
    clauses = differences()
    if clauses:
        raise RuntimeError(
            f"domino-vllm was made for vLLM {known}, and in this {vllm.__version__} {'; '.join(clauses)}. {change}"
        )
