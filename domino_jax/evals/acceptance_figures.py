"""Drafters compared on the same answers, from what each would have had accepted at every token (decoding/answers.py).

τ at w drafts is the tokens of all answers but their first ones, divided by the rounds of a walk with w drafts.
Intervals are by the bootstrap over answers. Differences are paired: each resample takes the same answers for both
drafters.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from domino_jax.decoding.acceptance import accept_histogram, accept_lengths, accept_rates
from domino_jax.decoding.answers import TargetAnswer
from domino_jax.decoding.evaluate import WIDTHS
from domino_jax.evals.bootstrap import interval, pooled
from domino_jax.method.exact import Accepted


def widths_of(most: int) -> tuple[int, ...]:
    """The numbers of drafts a round that get figures: WIDTHS below `most`, and `most`, all drafts of the block."""
    return (*(width for width in WIDTHS if width < most), most)


def acceptance_figures(answers: Sequence[TargetAnswer], accepted: Sequence[Accepted]) -> dict[str, Any]:
    """The figures of one drafter; JSON values only. "tau" and "intervals" are by the drafts of a round, "rounds" and
    "accept_by_position" of rounds with all drafts; "tau_backbone" is None without a backbone."""
    most = accepted[0].log_q.shape[1]
    drafts = [answer.drafts for answer in accepted]
    rounds = {width: count_rounds(drafts, width) for width in widths_of(most)}
    emitted = np.array([len(places) for places in drafts])
    lengths = Counter(length for places in drafts for length in accept_lengths(places, most))
    backbone = None
    if accepted[0].backbone is not None:
        backbone = tau(emitted, count_rounds([answer.backbone for answer in accepted], most))
    return {
        "tau": {str(width): tau(emitted, counts) for width, counts in rounds.items()},
        "intervals": {str(width): interval(pooled, emitted, counts) for width, counts in rounds.items()},
        "tau_backbone": backbone,
        "rounds": int(rounds[most].sum()),
        "accept_by_position": accept_rates(accept_histogram(lengths, most + 1))[0],
        "tasks": _by_task(answers, emitted, rounds),
    }


def _by_task(answers: Sequence[TargetAnswer], emitted: np.ndarray, rounds: Mapping[int, np.ndarray]) -> dict[str, Any]:
    tasks = np.array([answer.task or "" for answer in answers])
    figures = {}
    for task in filter(None, dict.fromkeys(tasks.tolist())):
        here = tasks == task
        taus = {str(width): tau(emitted[here], counts[here]) for width, counts in rounds.items()}
        figures[task] = {"answers": int(here.sum()), "tau": taus}
    return figures


def count_rounds(drafts: Sequence[np.ndarray], width: int) -> np.ndarray:
    """int64 [N], the rounds of each answer with `width` drafts; drafts: accepted at each of its tokens but the last."""
    return np.array([len(accept_lengths(places, width)) for places in drafts])


def tau(emitted: np.ndarray, rounds: np.ndarray) -> float | None:
    """Tokens that a round emits, over all answers; None without rounds."""
    return float(pooled(emitted, rounds)) if rounds.sum() else None


def pairs(accepted: Mapping[str, Sequence[Accepted]]) -> list[dict[str, Any]]:
    """For each two drafters, by the drafts of a round that both have: τ of the first minus τ of the second.

    Returns:
        [{"drafters": (first, second), "tau": {drafts: {"difference", "interval"}}}]
    """
    table = []
    for first, second in itertools.combinations(accepted, 2):
        drafts = [[answer.drafts for answer in accepted[name]] for name in (first, second)]
        emitted = np.array([len(places) for places in drafts[0]])
        shared = [set(widths_of(accepted[name][0].log_q.shape[1])) for name in (first, second)]
        by_width = {}
        for width in sorted(shared[0] & shared[1]):
            rounds = [count_rounds(places, width) for places in drafts]
            bounds = interval(
                lambda tokens, a, b, axis: pooled(tokens, a, axis) - pooled(tokens, b, axis), emitted, *rounds
            )
            difference = tau(emitted, rounds[0]) - tau(emitted, rounds[1])
            by_width[str(width)] = {"difference": difference, "interval": bounds}
        table.append({"drafters": [first, second], "tau": by_width})
    return table


def speedups(taus: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """By drafts of a round, the speed-up over plain decoding: τ × seconds of a plain step ÷ seconds of a round.

    seconds: by drafts, "0" is the plain step; widths that it does not list have no speed-up.
    """
    return {width: value * seconds["0"] / seconds[width] for width, value in taus.items() if width in seconds}
