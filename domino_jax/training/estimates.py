"""What a training run will need, by arithmetic on its shapes: FLOPs of a step, bytes on a device, epochs and hours.

FLOPs count a multiply-add as two operations. Elementwise work, norms, RoPE and softmax are left out, as is usual; they
are under one in a hundred at the public sizes. They are counted in two ways.

Lean: what has to be computed, once. The frozen target runs forward to its last tapped layer. A product with trained
weights costs three times its forward pass (the gradients of both sides), one with frozen weights or onto frozen inputs
twice. Work that a program repeats in the backward pass to save memory (sliced logits, rematerialised layers) is not
counted, and neither are attention scores outside the mask.

Naive: 6·N·D for the A·G block rows, N being the drafter's parameters and the lm_head's, and 2·N·D for the whole target
over the row. It charges frozen weights for gradients and leaves attention out.
"""

import math
import re
from typing import Any

import jax

from domino_jax.method.config import DrafterConfig
from domino_jax.method.heads.eagle3_config import Eagle3Config
from domino_jax.method.heads.medusa import MedusaConfig
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.names import DFLASH2, DOMINO, GATED, MARKOV, NONE, RNN
from domino_jax.models.decoder_config import DecoderConfig
from domino_jax.models.qwen3 import Qwen3Config

UTILISATION = 0.4  # share of the chips' dense peak that a well-tuned step reaches; printed with the hours

# Dense bfloat16 operations a second of one device, by JAX's device_kind or a topology's name; the first match counts.
# From the makers' data sheets, without sparsity.
PEAKS = (
    (r"TPU v4|^v4\b", 275e12),
    (r"TPU v5 ?lite|v5e", 197e12),
    (r"TPU v5|v5p", 459e12),
    (r"TPU v6|v6e", 918e12),
    (r"H100 PCIe", 756e12),
    (r"H[12]00 NVL", 835e12),
    (r"H100|H200", 989e12),
    (r"A100", 312e12),
    (r"B200", 2250e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by its kind ("TPU v5 lite", "NVIDIA H200", "v5e"); None where it is unknown."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, device_kind, re.IGNORECASE)), None)


def layer_matrices(config: DecoderConfig) -> int:
    """Weights of the matrices of one Qwen3 decoder layer."""
    c = config
    attention = 2 * c.hidden_size * (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    return attention + 3 * c.hidden_size * c.intermediate_size


def target_parameters(config: Qwen3Config) -> int:
    """Weights of the target's layers and lm_head; the embedding is a look-up and costs nothing."""
    return config.num_hidden_layers * layer_matrices(config) + config.vocab_size * config.hidden_size


def drafter_parameters(config: AnyConfig) -> int:
    """Weights of the drafter's matrices: fc, layers with their convolutions, head; a table of tokens is a look-up."""
    if not config.has_backbone:
        return row_drafter_parameters(config)
    c = config
    fc = len(c.target_layer_ids) * c.hidden_size**2
    gru = 3 * c.gru_hidden_dim * (c.hidden_size + c.gru_hidden_dim)
    heads = {
        NONE: 0,
        DOMINO: gru + c.emb_dim * (c.hidden_size + c.gru_hidden_dim + c.vocab_size),
        MARKOV: markov_matrices(c),
        DFLASH2: c.selector_rank * (c.hidden_size + c.selector_top_k),  # of one matrix the candidates' rows
    }
    return fc + c.num_hidden_layers * (layer_matrices(c) + convolution_matrices(c)) + heads[c.head]


def convolution_matrices(config: DrafterConfig) -> int:
    """Weights of the two matrices of a layer's convolutions."""
    c = config
    return 2 * 2 * c.conv_kernel_size * c.conv_groups * c.hidden_size if c.conv_kernel_size else 0


def markov_matrices(config: DrafterConfig) -> int:
    """Weights of a Markov head's matrices, without its table."""
    rank, width = config.markov_rank, config.hidden_size
    inner = {GATED: (width + rank) * rank, RNN: (2 * rank + width) * 3 * rank}
    return rank * config.vocab_size + inner.get(config.markov_head_type, 0)


def step_flops(
    target: Qwen3Config,
    drafter: AnyConfig,
    *,
    length: int,
    anchors: int,
    with_target: bool = True,
    distill: bool = False,
    passes: int = 1,
) -> dict[str, float]:
    """FLOPs of one training step for one row, forward and backward, by part; of drafters without blocks, see
    `_row_step_flops`.

    Attention over the context is counted for the keys that a block may read, on average over anchors spread evenly over
    the row: (length - 2) / 2 for an anchor in 0..length-2, fewer in a sliding layer.

    Args:
        length: S, tokens of the row.  anchors: A, blocks of the row; at most S - 1 count.
        with_target: False leaves the frozen target's pass out, as where features come from elsewhere.
        distill: the loss also reads the target's own logits: its pass goes through all layers and the lm_head.
        passes: of the training-time test of EAGLE-3.

    Returns:
        "target", "fusion" (fc), "context" (keys and values of the context), "blocks" (projections and feed-forward of
        the A·G block rows), "attention", "vocabulary" (logits by the lm_head), "head" (its own matrices and residual
        logits; 0 without one), and the totals "lean" (their sum) and "naive".
    """
    if not drafter.has_backbone:
        return _row_step_flops(target, drafter, length, passes, with_target)
    anchors = min(anchors, length - 1)
    d, rows = drafter, anchors * drafter.block_size
    width = d.hidden_size
    kv_width = d.num_key_value_heads * d.head_dim
    parts = {
        "target": _target_forward(target, d, length, distill) if with_target else 0.0,
        # Frozen features: no gradient onto them.
        "fusion": 2 * 2 * length * len(d.target_layer_ids) * width**2,
        "context": 3 * 2 * length * d.num_hidden_layers * 2 * width * kv_width,
        "blocks": 3 * 2 * rows * d.num_hidden_layers * (layer_matrices(d) + convolution_matrices(d)),
        "attention": 3 * anchors * sum(_block_attention(d, layer, length) for layer in range(d.num_hidden_layers)),
        # Frozen lm_head: no gradient onto it, and the target's logits, wanted to distill, have none at all. An
        # unshifted block's slot 0 predicts nothing.
        "vocabulary": (3 if distill else 2) * 2 * anchors * d.num_drafts * width * d.vocab_size,
        "head": _head(d, anchors),
    }
    weights = drafter_parameters(d) + d.vocab_size * width
    naive = 6.0 * weights * rows + (2.0 * target_parameters(target) * length if with_target else 0.0)
    return {**{part: float(flops) for part, flops in parts.items()}, "lean": float(sum(parts.values())), "naive": naive}


def row_drafter_parameters(config: Eagle3Config | MedusaConfig) -> int:
    """Weights of the matrices of a drafter without blocks."""
    width = config.hidden_size
    if isinstance(config, MedusaConfig):
        return config.num_heads * config.num_hidden_layers * width**2
    return 3 * width**2 + _eagle3_layer(config) + config.draft_vocab_size * width


def _eagle3_layer(config: Eagle3Config) -> int:
    """As layer_matrices, where queries, keys and values read twice the width."""
    inputs = config.hidden_size * (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return layer_matrices(config) + inputs


def _row_step_flops(
    target: Qwen3Config, drafter: Eagle3Config | MedusaConfig, length: int, passes: int, with_target: bool
) -> dict[str, float]:
    """step_flops of a drafter that learns from every row, with all layers of the target.

    Returns:
        "target", "fusion" (fc), "blocks" (the layer in all passes, or the heads' blocks), "attention", "vocabulary"
        (logits of the drafts and, for EAGLE-3, of the target), "lean", "naive".
    """
    width, pairs = drafter.hidden_size, length * (length + 1) / 2
    if isinstance(drafter, MedusaConfig):
        parts = {
            "fusion": 0.0,
            # The first blocks read frozen states: no gradient onto them.
            "blocks": 2 * length * drafter.num_heads * (3 * drafter.num_hidden_layers - 1) * width**2,
            "attention": 0.0,
            "vocabulary": 2 * 2 * length * drafter.num_heads * width * drafter.vocab_size,
        }
        predictions = length * drafter.num_heads
    else:
        heads = drafter.num_attention_heads * drafter.head_dim
        # Pass j reads its own row of all passes but the first.
        read = sum(pairs + index * length for index in range(passes))
        parts = {
            "fusion": 2 * 2 * length * 3 * width**2,
            "blocks": 3 * 2 * length * passes * _eagle3_layer(drafter),
            "attention": 3 * 4 * heads * read,
            "vocabulary": 2 * length * width * (3 * passes * drafter.draft_vocab_size + drafter.vocab_size),
        }
        predictions = length * passes
    whole = 2 * layer_matrices(target) * length + 4 * target.num_attention_heads * target.head_dim * pairs
    parts = {"target": target.num_hidden_layers * whole if with_target else 0.0, **parts}
    weights = row_drafter_parameters(drafter) + drafter.vocab_size * width
    naive = 6.0 * weights * predictions + (2.0 * target_parameters(target) * length if with_target else 0.0)
    return {**{part: float(flops) for part, flops in parts.items()}, "lean": float(sum(parts.values())), "naive": naive}


def _target_forward(target: Qwen3Config, drafter: DrafterConfig, length: int, whole: bool) -> float:
    depth = target.num_hidden_layers if whole else max(drafter.target_layer_ids) + 1
    pairs = length * (length + 1) / 2  # causal
    each = 2 * layer_matrices(target) * length + 4 * target.num_attention_heads * target.head_dim * pairs
    return depth * each


def _block_attention(drafter: DrafterConfig, layer: int, length: int) -> float:
    """Scores and weighted values of one block in one layer, forward."""
    size = drafter.block_size
    if drafter.is_sliding(layer):
        pairs = sum(_mean_keys(length, drafter.sliding_window - 1 - slot) for slot in range(size))
    else:
        pairs = size * _mean_keys(length, length)
    pairs += size * (size + 1) / 2 if drafter.causal(layer) else size * size
    return 4 * drafter.num_attention_heads * drafter.head_dim * pairs


def _mean_keys(length: int, most: int) -> float:
    """Mean of min(a, most) over the anchors a = 0..length-2: the context keys before a block, at most `most`."""
    most = min(max(most, 0), length - 2)
    return (most * (most + 1) / 2 + (length - 2 - most) * most) / (length - 1)


def _head(drafter: DrafterConfig, anchors: int) -> float:
    d = drafter
    if d.head == NONE:
        return 0.0
    if d.head == MARKOV:
        return 3 * 2 * markov_matrices(d) * anchors * d.num_drafts
    if d.head == DFLASH2:
        return 3 * 2 * d.selector_rank * (d.hidden_size + d.selector_top_k) * anchors * d.num_drafts
    consumed = anchors * d.num_drafts  # tokens that the GRU reads
    corrected = anchors * (d.block_size - d.suffix_start)  # slots that get residual logits
    # Frozen embeddings: no gradient onto the GRU's input.
    gru = (2 * d.hidden_size + 3 * d.gru_hidden_dim) * 2 * 3 * d.gru_hidden_dim * consumed
    residual = 3 * 2 * d.emb_dim * (d.hidden_size + d.gru_hidden_dim + d.vocab_size) * corrected
    return gru + residual


def run_hours(flops: float, device_kind: str, devices: int) -> float | None:
    """Hours that `flops` operations take at UTILISATION of the peak; None where the peak is unknown."""
    peak = peak_flops(device_kind)
    return flops / (peak * devices * UTILISATION) / 3600 if peak else None


# ------------------------------------------------------------------------------------------------------ memory


def device_bytes(tree: Any) -> int:
    """Bytes of the leaves of a tree (arrays or jax.ShapeDtypeStruct) on one device, by their shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        placed = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.sharding is not None
        shape = leaf.sharding.shard_shape(leaf.shape) if placed else leaf.shape
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            total += math.prod(shape) * leaf.dtype.itemsize
    return total
