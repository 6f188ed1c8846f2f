"""The loss of DSpark's Markov heads: cross-entropy, distance to the target's distribution, and confidence in each slot.

Source: the objective that SpecForge and DeepSpec publish for DSpark.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from domino_jax.method.losses import (
    EPSILON,
    Labels,
    LossSettings,
    Objective,
    Outputs,
    Sums,
    loss_metrics,
    total_variation,
)
from domino_jax.method.names import MARKOV


@dataclasses.dataclass(frozen=True)
class MarkovSettings(LossSettings):
    """Choices of this loss, which reads neither dpace_alpha nor distill.

    weights: of the cross-entropy, the L1 distance and the confidence.
    """

    weights: tuple[float, float, float] = (0.1, 0.9, 1.0)

    kind = MARKOV

    @property
    def reads_target(self) -> bool:
        return any(self.weights[1:])


class MarkovObjective(Objective):
    """(a·Σ w·CE + b·Σ w·L1 + c·Σ w·BCE) / Σ w, with a, b, c of settings.weights and no λ.

    L1 = Σ_v |q - p| of the final logits' q and the target's p. BCE is the binary cross-entropy of the confidence logits
    against the chance 1 - L1/2 that the draft is accepted, through which no gradient flows.

    Outputs: target where settings.reads_target; extra: confidence logits [n, G], or None without a confidence head.
    """

    def block_sums(self, outputs: Outputs, labels: Labels) -> Sums:
        sums = super().block_sums(outputs, labels)
        if outputs.target is None:
            return sums
        q, p = jax.nn.softmax(outputs.final), jax.nn.softmax(outputs.target)
        valid, weights = labels.label_weights, labels.loss_weights
        distance = 2.0 * total_variation(outputs.final, outputs.target)
        accepted = jax.lax.stop_gradient(jnp.clip(1.0 - distance / 2.0, 0.0, 1.0))
        agrees = jnp.argmax(outputs.final, axis=-1) == jnp.argmax(outputs.target, axis=-1)
        emitted = valid.max(-1) + jnp.cumprod(accepted * valid, axis=-1).sum(-1)
        sums |= {
            "l1": jnp.sum(weights * distance),
            "expected": emitted.sum(),
            "agrees": jnp.sum(valid * agrees),
            "target_top1": jnp.sum(valid * p.max(-1)),
            "draft_top1": jnp.sum(valid * q.max(-1)),
        }
        if outputs.extra is not None:
            confidence = outputs.extra
            sums["bce"] = jnp.sum(weights * optax.sigmoid_binary_cross_entropy(confidence, accepted))
            sums["confidence_error"] = jnp.sum(weights * jnp.abs(jax.nn.sigmoid(confidence) - accepted))
        return sums

    def loss(self, sums: Sums) -> jax.Array:
        weighted = zip(self.settings.weights, ("final_loss", "l1", "bce"), strict=True)
        return sum(share * sums[name] for share, name in weighted if name in sums) / (self.weight + EPSILON)

    def metrics(self, sums: Sums) -> dict[str, jax.Array]:
        """Those of loss_metrics without λ; with a target l1_loss, tau_probabilistic (the expected tokens of a round, a
        mean over blocks with a label), and of all slots with a label teacher_agreement, teacher_top1_prob and
        draft_top1_prob; with a confidence head confidence_loss and confidence_abs_error."""
        metrics = loss_metrics(sums, jnp.float32(0.0))
        del metrics["lambda_base"]
        weight = self.weight + EPSILON
        labels, blocks = jnp.maximum(sums["labels"], 1.0), jnp.maximum(sums["blocks"], 1.0)
        divisors = {
            "l1_loss": ("l1", weight),
            "confidence_loss": ("bce", weight),
            "confidence_abs_error": ("confidence_error", weight),
            "tau_probabilistic": ("expected", blocks),
            "teacher_agreement": ("agrees", labels),
            "teacher_top1_prob": ("target_top1", labels),
            "draft_top1_prob": ("draft_top1", labels),
        }
        metrics |= {name: sums[key] / divisor for name, (key, divisor) in divisors.items() if key in sums}
        return {**metrics, "loss": self.loss(sums)}
