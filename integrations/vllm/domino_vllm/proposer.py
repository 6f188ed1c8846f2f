"""Domino drafting in the engine's two runners: its DFlash drafters, with the head's roll-out after the backbone.

Contexts, caches, attention, verification and scheduling stay the engine's own. The engine picks a drafter by the method
"dflash", so its two classes make ours for the folder of a Domino drafter.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from domino_vllm.drafter import ARCHITECTURE, HEAD_KEYS, check_options, is_domino, read_head_config, values_of

engine_override = SpeculativeConfig.hf_config_override


def override(hf_config: Any, **options: Any) -> Any:
    """The engine's hook for the Hugging Face config of a drafter; a Domino drafter's gets our architecture."""
    config = engine_override(hf_config, **options)
    if is_domino(config):
        read_head_config(config)
        values = values_of(config)
        # The engine reads some of these in dflash_config alone; some folders have them at the top.
        nested = (values.get("dflash_config") or {}) | {name: values[name] for name in HEAD_KEYS if name in values}
        config.update({"architectures": [ARCHITECTURE], "dflash_config": nested})
    return config


class DominoProposer(DFlashProposer):
    """The drafter in the engine's first runner."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None):
        self.head_config = check_options(vllm_config)
        super().__init__(vllm_config, device, runner)

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> tuple[int, torch.Tensor, Any]:
        """The engine's inputs: an anchor and a mask for each draft. A shifted anchor predicts too: one mask fewer."""
        if not (self.head_config.shift_label and self.num_speculative_tokens):
            return super().set_inputs_first_pass(*args, **kwargs)
        self.num_speculative_tokens -= 1
        try:
            tokens, _, metadata = super().set_inputs_first_pass(*args, **kwargs)
        finally:
            self.num_speculative_tokens += 1
        return tokens, self.arange[:tokens], metadata

    def _sample_draft_tokens(self, hidden_states: torch.Tensor, sampling_metadata: Any) -> tuple[torch.Tensor, None]:
        """The slots that predict [B·M, D] → drafts [B·M], without probabilities."""
        drafts = self.num_speculative_tokens
        rows, slots = len(hidden_states) // drafts, drafts + (not self.head_config.shift_label)
        anchors = self.input_ids[: rows * slots : slots]
        return self.model.roll_out(hidden_states.unflatten(0, (rows, drafts)), anchors)[0].flatten(), None


class DominoSpeculator(DFlashSpeculator):
    """The drafter in the engine's second runner, which can hold a whole draft in one CUDA graph."""

    _speculator_name = "Domino"

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        config = check_options(vllm_config)
        super().__init__(vllm_config, device)
        self.sample_from_anchor = config.shift_label
        self.num_query_per_req = self.num_speculative_steps + (not config.shift_label)

    def _generate_draft(self, num_reqs: int, num_tokens_padded: int, *args: Any, **kwargs: Any) -> None:
        hidden_states = self._run_model(num_tokens_padded, *args, **kwargs)
        drafts, slots = self.num_speculative_steps, self.num_query_per_req
        z = hidden_states[self.sample_indices[: num_reqs * drafts]].unflatten(0, (num_reqs, drafts))
        anchors = self.input_buffers.input_ids[: num_reqs * slots : slots]
        adaptive = self.acceptance_estimator is not None  # enable_adaptive_verification
        self.draft_tokens[:num_reqs], corrected = self.model.roll_out(z, anchors, keep_logits=adaptive)
        if adaptive:
            # The estimator gets the candidates' logits, as from the engine's DFlash2.
            count, logits = num_reqs * drafts, torch.stack(corrected, dim=1).flatten(0, 1)
            self._maybe_predict_acceptance(logits, self.sample_idx_mapping[:count], self.sample_col[:count])


def make_instead(engine_class: type, domino_class: type) -> None:
    """`engine_class(vllm_config, …)` makes a `domino_class`, derived from it, for the drafter of a Domino folder."""

    def choose(cls: type, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        domino = cls is engine_class and is_domino(vllm_config.speculative_config.draft_model_config.hf_config)
        return object.__new__(domino_class if domino else cls)

    engine_class.__new__ = choose


def install() -> None:
    """In this process the engine drafts with the head of a Domino drafter from now on."""
    SpeculativeConfig.hf_config_override = staticmethod(override)
    ModelRegistry.register_model(ARCHITECTURE, "domino_vllm.model:DominoForCausalLM")
    make_instead(DFlashProposer, DominoProposer)
    make_instead(DFlashSpeculator, DominoSpeculator)
