"""Evaluation by decoding: τ of the drafter as it is now, on held-out prompts, by the real draft-and-verify loop."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from domino_jax.decoding.generate import BASELINE, Generation, Generator
from domino_jax.decoding.measure import accept_histogram, accept_rates, tau_per_prompt, tau_pooled
from domino_jax.training.evaluation_layout import EvaluationLayout


class DecodedEvaluation:
    """Decodes the same prompts again and again with changing drafter parameters; compiles once.

    Teacher-forced accept length counts labels from data at uniform anchors, so it stays above what decoding reaches
    (CONTRACT §2.13); this is the figure that counts.

    Args:
        generator: its target's parameters are the trainer's, where the training step wants them.
        layout: where weights are placed while an evaluation runs; None: where they are.
    """

    def __init__(self, generator: Generator, prompts: Sequence[Sequence[int]], layout: EvaluationLayout | None = None):
        self.generator = generator
        self.prompts = prompts
        self.layout = layout
        self._alone: list[Generation] | None = None  # the target's own answers: they never change

    def __call__(
        self, drafter_params: dict, between: Callable[[], None] | None = None
    ) -> dict[str, float | list[float]]:
        """τ and what goes with it; of the Domino mode, or of the backbone for a drafter without a head.

        Args:
            between: called after every few rounds; what it raises ends the evaluation.
        Returns:
            {"eval_tau" (pooled), "eval_tau_per_prompt", "eval_tau_backbone" (pooled, the head left out),
            "eval_identical": share of answers equal to the target's own, token for token,
            "eval_accept_by_position": share of rounds that kept the draft at each position,
            "eval_seconds": of all of it, compilation and the target's own answers included, which the first one makes}.
        """
        begin = time.monotonic()
        self.generator.between = between
        with self._placed(drafter_params):
            found = self._measure()
        return found | {"eval_seconds": time.monotonic() - begin}

    @contextlib.contextmanager
    def _placed(self, drafter_params: dict) -> Iterator[None]:
        """The generator with all weights where it decodes; both copies end with the block."""
        trained = self.generator.models.replace(drafter_params=None)
        target, drafter = trained.target_params, drafter_params
        if self.layout:
            target, drafter = self.layout.target_params(target), self.layout.drafter_params(drafter)
        self.generator.models = trained.replace(target_params=target, drafter_params=drafter)
        try:
            with jax.set_mesh(self.layout.mesh) if self.layout else contextlib.nullcontext():
                yield
        finally:
            # The drafter's parameters are the trainer's, which goes on to donate them.
            self.generator.models = trained

    def _measure(self) -> dict[str, float | list[float]]:
        if self._alone is None:
            self._alone = self.generator.generate(self.prompts, BASELINE)
        backbone = self.generator.generate(self.prompts, "backbone")
        config = self.generator.models.drafter.config
        width = self.generator.drafting.width(config) + 1
        measured = self.generator.generate(self.prompts, "domino") if config.has_head else backbone
        same = sum(ours.token_ids == own.token_ids for ours, own in zip(measured, self._alone, strict=True))
        return {
            "eval_tau": tau_pooled(measured),
            "eval_tau_per_prompt": tau_per_prompt(measured),
            "eval_tau_backbone": tau_pooled(backbone),
            "eval_identical": same / len(self.prompts),
            "eval_accept_by_position": accept_rates(accept_histogram(measured, width))[0],
        }
