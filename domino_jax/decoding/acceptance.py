"""Acceptance: τ, the tokens that a round emits on average, and the rate of every draft position."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.decoding.generate import Generation


def accept_histogram(counts: Mapping[int, int], width: int) -> dict[str, int]:
    """{"1": rounds that emitted one token, … up to "width"}; {} when there was no round."""
    return {str(length): counts[length] for length in range(1, width + 1)} if counts else {}


def acceptance_record(counts: Mapping[int, int], drafts: int) -> dict[str, Any] | None:
    """The acceptance of drafts under the names by which engines report it and benchmark clients read it (vLLM, AIPerf).

    Args:
        counts: rounds by the tokens that they emitted.  drafts: that they offered to the target.

    Returns:
        None without rounds. The bonus token counts in mean_acceptance_length alone. num_spec_tokens is the drafts of a
        step; where the width changes their mean, rounded up, or the most that a step accepted if that is more. The
        histogram has the steps that accepted 0, 1, … num_spec_tokens drafts.
    """
    steps = sum(counts.values())
    if not steps:
        return None
    accepted = sum((emitted - 1) * count for emitted, count in counts.items())
    most = max(math.ceil(drafts / steps), *(emitted - 1 for emitted in counts))
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafts if drafts else 0.0,
        "acceptance_histogram": [counts[size] if size in counts else 0 for size in range(1, most + 2)],
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafts,
        "num_spec_steps": steps,
        "num_spec_tokens": most,
    }


def accept_rates(histogram: Mapping[str, int]) -> tuple[list[float], list[float | None]]:
    """(rate, conditional rate) of draft positions 1, 2, …; a conditional rate is None where no round got so far."""
    counts = list(histogram.values())
    reached = [sum(counts[position:]) for position in range(len(counts))]  # rounds that emitted more than `position`
    plain = [more / reached[0] for more in reached[1:]]
    pairs = zip(reached[1:], reached, strict=False)
    return plain, [more / before if before else None for more, before in pairs]


def tau_pooled(generations: Sequence[Generation]) -> float:
    """τ over all rounds of all prompts: tokens emitted per target pass, without the prefill's; 0 without rounds."""
    rounds = [emitted for answer in generations for emitted in answer.accept_lengths]
    return sum(rounds) / len(rounds) if rounds else 0.0


def tau_per_prompt(generations: Sequence[Generation]) -> float:
    """The mean over prompts of each prompt's mean; prompts without a round are left out."""
    means = [statistics.fmean(answer.accept_lengths) for answer in generations if answer.accept_lengths]
    return statistics.fmean(means) if means else 0.0
