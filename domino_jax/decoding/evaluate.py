"""Evaluation: τ of a drafter, on the target's answers to held-out prompts, without decoding.

Teacher-forced accept length counts labels from data at uniform anchors, so it is above what decoding reaches. The τ
here equals τ of the draft-and-verify loop, round by round (decoding/answers.py).
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence

from domino_jax.decoding.acceptance import accept_histogram, accept_lengths, accept_rates, tau_per_prompt, tau_pooled
from domino_jax.decoding.answers import AnswerPasses
from domino_jax.method.pair import Pair
from domino_jax.runtime.progress import Progress

WIDTHS = (1, 2, 4, 8, 16)  # drafts of a round for which τ is reported, where the block is that long


class Evaluation:
    """Judges the same answers again and again with changing drafter parameters; compiles once.

    Args:
        models: the target's parameters are the trainer's; the drafter has none.
        drafts: of a round, for the figures that name no other number.
    """

    def __init__(self, models: Pair, passes: AnswerPasses, drafts: int):
        self.models, self.passes, self.drafts = models, passes, drafts

    @property
    def measured_with(self) -> str:
        """Tells evaluations apart whose τ must not be compared: by the answers, and by how rounds draft."""
        settings = self.passes.settings
        drafting = (self.drafts, settings.head_candidates, settings.head_passes, settings.draft_sharpness)
        return hashlib.sha256(repr((drafting, self.passes.digest)).encode()).hexdigest()[:16]

    def __call__(
        self,
        drafter_params: dict,
        between: Callable[[], None] = lambda: None,
    ) -> dict[str, float | list[float]]:
        """τ and what goes with it.

        Args:
            between: called after every pass; what it raises ends the evaluation.
        Returns:
            "eval_tau" (pooled), "eval_tau_per_prompt", "eval_tau_backbone" (the head left out), "eval_tau_1", … (with
            that number of drafts a round), "eval_accept_by_position" (share of rounds that kept the draft there) and
            "eval_seconds" (compilation included).
        """
        begin = time.monotonic()
        progress = Progress("evaluation", len(self.passes.answers))

        def after(answers: int) -> None:
            progress.advance(answers)
            between()

        accepted = self.passes(self.models.replace(drafter_params=drafter_params), after)
        drafts = [answer.drafts for answer in accepted]
        walks = _walks(drafts, self.drafts)
        rounds = Counter(emitted for walk in walks for emitted in walk)
        figures = {"eval_tau": tau_pooled(walks), "eval_tau_per_prompt": tau_per_prompt(walks)}
        if self.models.drafter.config.has_backbone:
            figures["eval_tau_backbone"] = tau_pooled(_walks([answer.backbone for answer in accepted], self.drafts))
        for width in WIDTHS:
            if width <= self.models.drafter.config.num_drafts:
                figures[f"eval_tau_{width}"] = tau_pooled(_walks(drafts, width))
        figures["eval_accept_by_position"] = accept_rates(accept_histogram(rounds, self.drafts + 1))[0]
        return figures | {"eval_seconds": time.monotonic() - begin}


def _walks(accepted: Sequence, drafts: int) -> list[list[int]]:
    return [accept_lengths(answer, drafts) for answer in accepted]
