"""What a training run will need, by arithmetic on its shapes: bytes on a device, steps, tokens, epochs, hours.

Estimates, said to be such: `--dry_run` compiles the step and has the compiler's own count.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from domino_jax.drafters.config import DrafterConfig
from domino_jax.models.qwen3 import Qwen3Config
from domino_jax.models.sharding import row_shards
from domino_jax.training.flops import peak_flops, step_flops

# What a well-tuned step reaches of the chips' dense peak; the hours are told with it.
UTILISATION = 0.4
# Queries whose scores over a whole row live at once in the target's pass (nn/attention.attend_causal).
TARGET_SLICE_ROWS = 512


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the recipe says about the steps, as plain values.

    batch_size: rows (items, when packed) of a step over all devices; accumulate: micro-batches they are cut into.
    layout: pad, pack or buckets.  dtype: of the computation.  loss_slice_blocks, attention_slice_blocks: anchor blocks
    of a row whose logits, or scores, live at once.
    scored_rows: rows whose answers the target scores (0: none); low_logprob: a mean log-probability, in nats a token,
    below which one is told.  seed: of the sample.
    """

    steps: int
    batch_size: int
    max_length: int
    num_anchors: int
    layout: str = "pad"
    accumulate: int = 1
    loss_slice_blocks: int = 32
    attention_slice_blocks: int = 32
    remat: bool = False
    dtype: str = "bfloat16"
    scored_rows: int = 64
    low_logprob: float = -2.0
    seed: int = 0


def memory_per_device(
    target: Qwen3Config, target_params: Any, drafter: DrafterConfig, state: Any, plan: Plan, mesh: Mesh | None
) -> dict[str, int]:
    """Bytes of one device by part, and their "total"; the target's pass and the drafter's do not overlap in it.

    Args:
        target_params, state: arrays or shapes with their shardings; state has params, opt_state and ema.
    """
    rows = math.ceil(plan.batch_size / plan.accumulate / (row_shards(mesh) if mesh else 1))
    tensor = mesh.shape["tensor"] if mesh else 1
    size, length = np.dtype(plan.dtype).itemsize, plan.max_length
    d, blocks = drafter, plan.num_anchors
    slots = rows * blocks * d.block_size
    inner = (d.num_attention_heads + d.num_key_value_heads) * d.head_dim + d.intermediate_size
    # Kept for the backward pass, a layer: its inputs alone, or what its products read as well.
    kept = d.hidden_size + (0 if plan.remat else 5 * d.hidden_size + 3 * inner // tensor)
    keys = 2 * rows * length * d.num_key_value_heads * d.head_dim // tensor
    slice_slots = rows * min(plan.attention_slice_blocks, blocks) * d.block_size
    heads = 2 if d.has_head else 1  # base logits, and final ones
    logit_slots = rows * min(plan.loss_slice_blocks, blocks) * d.block_size
    parts = {
        "target parameters": device_bytes(target_params),
        "drafter parameters": device_bytes((state.params, state.ema)),
        "optimizer": device_bytes(state.opt_state),
        "gradients": device_bytes(state.params),
        "features": rows * length * len(d.target_layer_ids) * d.hidden_size * size,
        "drafter activations": d.num_hidden_layers * (slots * kept + 2 * keys) * size,
        "attention slice": 2 * slice_slots * (length + d.block_size) * d.num_attention_heads // tensor * 4,
        "logits slice": 2 * heads * logit_slots * d.vocab_size // tensor * 4,
        "target pass": _target_pass(target, rows, length, tensor, size),
    }
    drafting = sum(parts[name] for name in ("drafter activations", "attention slice", "logits slice", "gradients"))
    lasting = sum(parts[name] for name in ("target parameters", "drafter parameters", "optimizer", "features"))
    return {**parts, "total": lasting + max(drafting, parts["target pass"])}


def _target_pass(target: Qwen3Config, rows: int, length: int, tensor: int, size: int) -> int:
    scores = rows * target.num_attention_heads * min(TARGET_SLICE_ROWS, length) * length * 4
    wide = rows * length * (4 * target.hidden_size * tensor + 3 * target.intermediate_size) * size
    return (scores + wide) // tensor


def device_bytes(tree: Any) -> int:
    """Bytes that the leaves of a tree (arrays or jax.ShapeDtypeStruct) take on one device by their shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        placed = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.sharding is not None
        shape = leaf.sharding.shard_shape(leaf.shape) if placed else leaf.shape
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            total += math.prod(shape) * leaf.dtype.itemsize
    return total


def device_memory() -> int | None:
    """Bytes of this process' first device; None where jax does not say (a CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats and "bytes_limit" in stats else None


def run_length(
    target: Qwen3Config, drafter: DrafterConfig, plan: Plan, num_rows: int, num_tokens: int, devices: int
) -> dict[str, Any]:
    """{"steps", "rows", "tokens", "epochs", "flops_per_step", "device", "devices", "hours", "utilisation"}.

    rows, tokens, epochs: seen over the run, padding left out; with packing about so many. hours: None where the
    device's peak is not known. flops_per_step: the lean count at max_length.
    """
    mean = num_tokens / num_rows
    # A pack is about full: whole rows of at most max_length tokens together.
    rows_per_item = max(1.0, plan.max_length / mean) if plan.layout == "pack" else 1.0
    rows = plan.steps * plan.batch_size * rows_per_item
    each = step_flops(target, drafter, length=plan.max_length, anchors=plan.num_anchors)["lean"]
    kind = jax.devices()[0].device_kind
    peak = peak_flops(kind)
    flops = each * plan.batch_size
    hours = plan.steps * flops / (peak * devices * UTILISATION) / 3600 if peak else None
    return {
        "steps": plan.steps,
        "rows": round(rows),
        "tokens": round(rows * mean),
        "epochs": rows / num_rows,
        "flops_per_step": flops,
        "device": kind,
        "devices": devices,
        "hours": hours,
        "utilisation": UTILISATION,
    }
