"""Evaluation by decoding: τ of the drafter as it is now, on held-out prompts, by the real draft-and-verify loop."""

from collections.abc import Sequence

from domino_jax.decoding.generate import Generator
from domino_jax.decoding.measure import tau_per_prompt, tau_pooled


class DecodedEvaluation:
    """Decodes the same prompts again and again with changing drafter parameters; compiles once.

    Teacher-forced accept length counts labels from data at uniform anchors, so it stays above what decoding reaches
    (CONTRACT §2.13); this is the figure that counts.
    """

    def __init__(self, generator: Generator, prompts: Sequence[Sequence[int]]):
        self.generator = generator
        self.prompts = prompts

    def __call__(self, drafter_params: dict) -> dict[str, float]:
        """{"eval_tau", "eval_tau_per_prompt", "eval_tau_backbone"}; the Domino twins only for a drafter with a head."""
        self.generator.models = self.generator.models.replace(drafter_params=drafter_params)
        backbone = self.generator.generate(self.prompts, "backbone")
        measured = backbone
        if self.generator.models.drafter.config.has_head:
            measured = self.generator.generate(self.prompts, "domino")
        return {
            "eval_tau": tau_pooled(measured),
            "eval_tau_per_prompt": tau_per_prompt(measured),
            "eval_tau_backbone": tau_pooled(backbone),
        }
