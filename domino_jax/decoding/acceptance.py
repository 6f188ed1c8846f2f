"""Acceptance: the rounds of an answer, τ (the tokens that a round emits on average), and rates by draft position."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def accept_lengths(accepted: Sequence[int], width: int) -> list[int]:
    """The tokens that each round of a decoding emits, with `width` drafts at most: the walk over an answer.

    accepted: for every token of the answer but the last, how many drafts of a round that starts there the target
        accepts (method/exact.py). The prefill emits the first token.

    >>> accepted 2 0 1 0 0, width 2  →  3 1 1        width 1  →  2 2 1
    """
    lengths, place = [], 0
    while place < len(accepted):
        lengths.append(min(min(int(accepted[place]), width) + 1, len(accepted) - place))
        place += lengths[-1]
    return lengths


def accept_histogram(counts: Mapping[int, int], width: int) -> dict[str, int]:
    """{"1": rounds that emitted one token, … up to "width"}; {} when there was no round."""
    return {str(length): counts[length] for length in range(1, width + 1)} if counts else {}


def acceptance_record(counts: Mapping[int, int], drafts: int) -> dict[str, Any] | None:
    """The acceptance of drafts under vLLM's names; None without rounds.

    Args:
        counts: rounds by the tokens that they emitted.  drafts: that they offered to the target.

    The bonus token counts in mean_acceptance_length alone. num_spec_tokens is the drafts of a step; where the width
    changes, their mean, rounded up, or the most that a step accepted if that is more.
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


def tau_pooled(walks: Sequence[Sequence[int]]) -> float:
    """τ over all rounds of all answers, each given by its accept_lengths: tokens emitted per target pass, without the
    prefill's; 0 without rounds."""
    rounds = [emitted for walk in walks for emitted in walk]
    return sum(rounds) / len(rounds) if rounds else 0.0


def tau_per_prompt(walks: Sequence[Sequence[int]]) -> float:
    """The mean over answers of each answer's mean; answers without a round are left out."""
    means = [statistics.fmean(walk) for walk in walks if walk]
    return statistics.fmean(means) if means else 0.0
