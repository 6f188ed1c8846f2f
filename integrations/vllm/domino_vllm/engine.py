"""The names of vLLM that this plug-in uses. Another version, or one with other names or parameters, is refused."""

import functools
import importlib
import inspect

VERSIONS = ("0.32", "0.33")
MODEL = "model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"
PROPOSER = "v1.spec_decode.dflash:DFlashProposer"  # of the runner that CPUs pick
SPECULATOR = "v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator"  # of the runner that GPUs pick
METADATA = ("attn_metadata", "slot_mappings", "num_tokens_across_dp", "cudagraph_runtime_mode")
# By module and name, with the parameters that VERSIONS have in common; others there have defaults.
USED = {
    "config.speculative:SpeculativeConfig.hf_config_override": ("hf_config",),
    "model_executor.models.registry:ModelRegistry.register_model": ("model_arch", "model_cls"),
    f"{MODEL}.__init__": ("self", "vllm_config", "prefix"),
    f"{MODEL}.load_weights": ("self", "weights"),
    f"{MODEL}.compute_logits": ("self", "hidden_states"),
    f"{MODEL}.embed_input_ids": ("self", "input_ids", "multimodal_embeddings", "is_multimodal"),
    f"{PROPOSER}.__init__": ("self", "vllm_config", "device", "runner"),
    f"{PROPOSER}._sample_draft_tokens": ("self", "hidden_states", "sampling_metadata"),
    f"{PROPOSER}.set_inputs_first_pass": (
        *("self", "target_token_ids", "next_token_ids", "target_positions", "target_hidden_states"),
        *("token_indices_to_sample", "cad", "num_rejected_tokens_gpu"),
    ),
    f"{SPECULATOR}.__init__": ("self", "vllm_config", "device"),
    f"{SPECULATOR}._generate_draft": ("self", "num_reqs", "num_tokens_padded", *METADATA),
    f"{SPECULATOR}._run_model": ("self", "num_tokens", *METADATA),
    f"{SPECULATOR}._maybe_predict_acceptance": ("self", "logits", "idx_mapping", "draft_step"),
}


def differences() -> list[str]:
    """One clause for each name of USED that the installed vLLM lacks or defines with other parameters."""
    clauses = []
    for name, expected in USED.items():
        module, _, names = name.partition(":")
        try:
            used = functools.reduce(getattr, names.split("."), importlib.import_module(f"vllm.{module}"))
            actual = inspect.signature(used).parameters
        except (ImportError, AttributeError):
            clauses.append(f"{name} is missing")
            continue
        needed = tuple(key for key, value in actual.items() if key in expected or value.default is value.empty)
        if needed != expected:
            clauses.append(f"{name} has the parameters ({', '.join(actual)}) instead of ({', '.join(expected)})")
    return clauses


def check() -> None:
    """Raises RuntimeError unless the installed vLLM is one of VERSIONS and has all of USED."""
    from vllm import __version__ as version

    known, change = " and ".join(VERSIONS), "Install one of these, or uninstall domino-vllm."
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise RuntimeError(f"domino-vllm was made for vLLM {known}, and this is {version}. {change}")
    if clauses := differences():
        message = f"domino-vllm was made for vLLM {known}, and in this {version} {'; '.join(clauses)}. {change}"
        raise RuntimeError(message)
