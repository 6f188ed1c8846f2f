"""AdamW with linear warm-up, cosine decay to zero and global-norm clipping (CONTRACT §2.12)."""

import optax


def learning_rate(peak: float, total_steps: int, warmup_ratio: float) -> optax.Schedule:
    """peak·(s+1)/W for the first W = ⌊ratio·T⌋ steps, then half a cosine to 0 at step T."""
    warmup = int(warmup_ratio * total_steps)
    cosine = optax.cosine_decay_schedule(peak, max(1, total_steps - warmup))
    if warmup == 0:
        return cosine
    # s+1, not s: the first step would otherwise have rate 0 and train nothing.
    return optax.join_schedules([lambda step: peak * (step + 1) / warmup, cosine], [warmup])


def make_optimizer(
    schedule: optax.Schedule, *, b1: float, b2: float, eps: float, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Clip by the global L2 norm, then AdamW; moments in the parameters' dtype, which is float32."""
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay),
    )
