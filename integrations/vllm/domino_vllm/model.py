"""The drafter in the engine: its DFlash backbone and our head."""

from collections.abc import Iterable

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from domino_vllm.drafter import Unsupported, candidates, check_options
from domino_vllm.head import Head


class DominoForCausalLM(DFlashQwen3ForCausalLM):
    """The head is whole on every device; the engine gathers the base logits of all of them."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        config = check_options(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        sizes = self.config.hidden_size, config.gru_hidden_dim, config.emb_dim, self.config.vocab_size
        self.head = Head(*sizes, config.pure_draft_prefix_len, candidates(vllm_config))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises Unsupported if a tensor of the head is missing or has another shape than config.json states."""
        expected, stored = self.head.state_dict(), {}

        def backbone():
            for name, tensor in weights:
                short = name.removeprefix("logit_head.")  # of early files
                if short in expected:
                    stored[short] = tensor
                else:
                    yield name, tensor

        super().load_weights(backbone())
        for name, leaf in expected.items():
            shape = tuple(stored[name].shape) if name in stored else "missing"
            if shape != tuple(leaf.shape):
                raise Unsupported(f"The drafter's {name} is {shape}, and its config.json states {tuple(leaf.shape)}.")
        self.head.load_state_dict(stored)

    def roll_out(
        self, z: torch.Tensor, anchors: torch.Tensor, keep_logits: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Head.forward for the slots that predict, [B, M, D], after anchors [B]."""
        base = self.compute_logits(z.flatten(0, 1)).unflatten(0, z.shape[:2])
        return self.head(base, z, anchors, self.embed_input_ids, keep_logits)
