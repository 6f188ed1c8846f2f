"""Evaluation by decoding: τ of the drafter as it is now, on held-out prompts, by the real draft-and-verify loop."""

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import jax

from domino_jax.decoding.acceptance import accept_histogram, accept_rates, tau_per_prompt, tau_pooled
from domino_jax.decoding.generate import Generation, Generator
from domino_jax.decoding.settings import BACKBONE, BASELINE, DRAFT
from domino_jax.method.pair import Models
from domino_jax.runtime.progress import Progress
from domino_jax.training.evaluation_layout import EvaluationLayout

SILENT = functools.partial(Progress, bar=False, lines=False)


class DecodedEvaluation:
    """Decodes the same prompts again and again with changing drafter parameters; compiles once.

    Teacher-forced accept length counts labels from data at uniform anchors, so it stays above what decoding reaches;
    this is the figure that counts.

    Args:
        models: the target's parameters are the trainer's, placed for the training step; the drafter has none.
        layout: where weights are placed while an evaluation runs; None: where they are.
    """

    def __init__(
        self,
        models: Models,
        generator: Generator,
        prompts: Sequence[Sequence[int]],
        layout: EvaluationLayout | None = None,
    ):
        self.models = models
        self.generator = generator
        self.prompts = prompts
        self.layout = layout
        self._alone: list[Generation] | None = None  # the target's own answers: they never change

    def __call__(
        self,
        drafter_params: dict,
        between: Callable[[], None] = lambda: None,
        progress: Callable[[str, int], Progress] = SILENT,
    ) -> dict[str, float | list[float]]:
        """τ and what goes with it; of mode draft, or of the backbone for a drafter without a head.

        Args:
            between: called after every few rounds; what it raises ends the evaluation.
            progress: (label, answers to come) → what counts the answers.
        Returns:
            {"eval_tau" (pooled), "eval_tau_per_prompt", "eval_tau_backbone" (pooled, the head left out; not of drafters
            without a backbone),
            "eval_identical": share of answers equal to the target's own, token for token,
            "eval_accept_by_position": share of rounds that kept the draft at each position,
            "eval_seconds": of all of it, compilation and the target's own answers included, which the first one makes}.
        """
        begin = time.monotonic()
        with self._placed(drafter_params) as models:
            figures = self._measure(models, between, progress)
        return figures | {"eval_seconds": time.monotonic() - begin}

    @contextlib.contextmanager
    def _placed(self, drafter_params: dict) -> Iterator[Models]:
        """The models with all weights placed for decoding; nobody keeps them after the block."""
        target, drafter = self.models.target_params, drafter_params
        if self.layout:
            target, drafter = self.layout.target_params(target), self.layout.drafter_params(drafter)
        with jax.set_mesh(self.layout.mesh) if self.layout else contextlib.nullcontext():
            yield self.models.replace(target_params=target, drafter_params=drafter)

    def _measure(
        self, models: Models, between: Callable[[], None], progress: Callable[[str, int], Progress]
    ) -> dict[str, float | list[float]]:
        config = models.drafter.config
        drafting = [BACKBONE] * config.has_backbone + [DRAFT] * (config.has_head or not config.has_backbone)
        modes = [*([BASELINE] if self._alone is None else []), *drafting]
        answers = {}
        with progress("evaluation", len(modes) * len(self.prompts)) as bar:
            for mode in modes:
                answers[mode] = self._decode(models, mode, between, bar)
        self._alone = self._alone or answers[BASELINE]
        measured = answers[modes[-1]]
        walks = {mode: [answer.accept_lengths for answer in answers[mode]] for mode in answers}
        backbone = {"eval_tau_backbone": tau_pooled(walks[BACKBONE])} if BACKBONE in answers else {}
        width = self.generator.drafting(DRAFT).width(config) + 1
        rounds = Counter(emitted for answer in measured for emitted in answer.accept_lengths)
        same = sum(ours.token_ids == plain.token_ids for ours, plain in zip(measured, self._alone, strict=True))
        return {
            "eval_tau": tau_pooled(walks[modes[-1]]),
            "eval_tau_per_prompt": tau_per_prompt(walks[modes[-1]]),
            **backbone,
            "eval_identical": same / len(self.prompts),
            "eval_accept_by_position": accept_rates(accept_histogram(rounds, width))[0],
        }

    def _decode(self, models: Models, mode: str, between: Callable[[], None], bar: Progress) -> list[Generation]:
        counted = 0

        def after_rounds(finished: int) -> None:
            nonlocal counted
            bar.advance(finished - counted)
            counted = finished
            between()

        answers = self.generator.generate(models, self.prompts, mode, between=after_rounds).answers
        bar.advance(len(answers) - counted)
        return answers
