"""SpecForge's side of specforge.py: one Domino training step through its public modules, on torch.

SpecForge's own are the drafter (`DominoDraftModel`), everything from the noise embedding to the loss
(`OnlineDominoModel`) and the optimizer (`BF16Optimizer`: AdamW over float32 master copies). All of them import and run
on a CPU as they are. Two parts stand in for SpecForge's:

- The anchors are given: a subclass returns them in place of random ones, with as many slots as the fullest row fills.
- The features come from transformers' Qwen3, in inference mode and without its lm_head, and are read from the layers'
  outputs by SpecForge's `extract_context_feature`. Its trainer gets them from an SGLang server, which needs a GPU.
"""

import pathlib
import sys
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM

MODULES = "specforge/algorithms/common/dflash_family_model.py"  # in every checkout


def add_checkout(folder: pathlib.Path) -> None:
    """Makes `import specforge` find the checkout; ends with a message where there is none."""
    if not (folder / MODULES).is_file():
        raise SystemExit(f"{folder} has no {MODULES}; --specforge names the root of a checkout of SpecForge.")
    sys.path.insert(0, str(folder.resolve()))


class SpecForgeTrainer:
    """The state of a run and its step.

    Args:
        target, drafter: folders in the public layout, the drafter's with SpecForge's architecture.
        rate, clip, gamma: learning rate (constant), global norm to clip to, decay of the slots.
        attention: "sdpa" or "eager"; flex_attention has no backward pass on a CPU.
        chunk: anchor blocks whose logits live at a time, made again in the backward pass; 0: all at once, made once.
    """

    def __init__(
        self,
        target: pathlib.Path,
        drafter: pathlib.Path,
        *,
        rate: float,
        clip: float,
        gamma: float,
        attention: str,
        chunk: int,
    ):
        from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
        from specforge.modeling.draft.domino import DominoDraftModel
        from specforge.optimizer import BF16Optimizer

        class GivenAnchors(OnlineDominoModel):
            anchors: tuple[torch.Tensor, torch.Tensor]

            def _sample_anchor_positions(self, seq_len, loss_mask, device):
                return self.anchors

        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().requires_grad_(False)
        module = DominoDraftModel.from_pretrained(drafter, dtype=torch.float32, attn_implementation=attention).train()
        self.taps = module.target_layer_ids
        self.model = GivenAnchors(
            module,
            self.target.lm_head,
            self.target.get_input_embeddings(),
            mask_token_id=module.mask_token_id,
            block_size=module.block_size,
            attention_backend=attention,
            loss_decay_gamma=gamma,
            objective_chunk_blocks=chunk,
            shift_label=module.shift_label,
        )
        self.optimizer = BF16Optimizer(module, rate, max_grad_norm=clip, warmup_ratio=0.0, lr_scheduler="constant")

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        from specforge.modeling.draft.dflash import extract_context_feature

        with torch.no_grad():
            out = self.target.model(tokens, use_cache=False, output_hidden_states=True)
            return extract_context_feature(out.hidden_states, self.taps)

    def step(self, batch: dict[str, np.ndarray], anchors: np.ndarray, keep: np.ndarray, lambda_base: float):
        """(loss, seconds of the target's pass, seconds of the rest) of one step on arrays as ours gets them."""
        tokens = torch.from_numpy(batch["tokens"]).long()
        mask = torch.from_numpy(batch["loss_mask"])
        width = int(keep.sum(1).max())
        self.model.anchors = torch.tensor(anchors[:, :width]).long(), torch.tensor(keep[:, :width])
        begin = time.perf_counter()
        features = self.features(tokens)
        between = time.perf_counter()
        loss, _, _ = self.model(tokens, features, mask, lambda_base=lambda_base)
        loss.backward()
        self.optimizer.step()
        return loss.item(), between - begin, time.perf_counter() - between
