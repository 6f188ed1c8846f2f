"""A plug-in for vLLM's CPU build, whose norm differs from the trained drafter's.

DFlash norms its context keys [layers, tokens, heads, head_dim] with weights [layers, head_dim]. The CPU kernel of
vLLM 0.32.0 uses the first row for all layers.
"""

import torch
from vllm import _custom_ops as ops

kernel = ops.rms_norm


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    """vLLM's kernel, called once for each row of weights."""
    if weight is None or weight.ndim == 1:
        kernel(out, x, weight, epsilon)
    else:
        for layer, row in enumerate(weight):
            kernel(out[layer], x[layer], row, epsilon)


def register() -> None:
    ops.rms_norm = rms_norm
