"""Optimizers with linear warm-up, cosine decay to zero and global-norm clipping."""

import jax
import optax

B1, B2, EPSILON = 0.9, 0.999, 1e-8  # of Adam, as published
CLIP_NORM = 1.0  # the paper's


def learning_rate(peak: float, total_steps: int, warmup_ratio: float) -> optax.Schedule:
    """peak·(s+1)/W for the first W = ⌊ratio·T⌋ steps, then half a cosine to 0 at step T."""
    warmup = int(warmup_ratio * total_steps)
    cosine = optax.cosine_decay_schedule(peak, max(1, total_steps - warmup))
    if warmup == 0:
        return cosine
    # s+1, not s: the first step would otherwise have rate 0 and train nothing.
    return optax.join_schedules([lambda step: peak * (step + 1) / warmup, cosine], [warmup])


def make_optimizer(kind: str, frozen_backbone: bool = False) -> optax.GradientTransformation:
    """Clip by the global L2 norm, then `kind`: "adamw" (the paper's, without weight decay) or "muon", which
    orthogonalises the updates of the hidden matrices and leaves all else to optax's Nesterov AdamW.

    Its updates have learning rate 1. The training step multiplies them by the schedule at TrainState.step: an
    optimizer's own count stops at skipped steps, and the rate would then never reach the end of its schedule.

    frozen_backbone: the backbone never changes, and has no moments.
    """
    if kind == "muon":
        update = optax.contrib.muon(
            learning_rate=1.0,
            # Updates as large as AdamW's (RMS 0.2), so that one learning rate serves both halves.
            consistent_rms=0.2,
            adam_b1=B1,
            adam_b2=B2,
            eps=EPSILON,
            muon_weight_dimension_numbers=_hidden_matrices,
        )
    else:
        update = optax.adamw(1.0, b1=B1, b2=B2, eps=EPSILON, weight_decay=0.0)
    chain = optax.chain(optax.clip_by_global_norm(CLIP_NORM), update)
    if not frozen_backbone:
        return chain
    parts = {"frozen": optax.set_to_zero(), "trained": chain}
    return optax.partition(parts, {"backbone": "frozen", "head": "trained"})


def _hidden_matrices(params: dict) -> dict:
    """Marks the matrices between hidden states; a head's tables of tokens, [V, …] and […, V], are none of them."""

    def mark(path: tuple, leaf: jax.Array):
        of_tokens = any(part.key in ("up", "predecessor", "lm_head") for part in path)
        return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 and not of_tokens else None

    return jax.tree_util.tree_map_with_path(mark, params)
