"""One mode's answers as sums, and their figures: rates, τ, acceptance, equal outputs and 95 % intervals.

Intervals are by the bootstrap (bootstrap.py). τ is resampled over answers. Rates and speed-ups are resampled over
groups, the prompts that ran together: at batch size 1 single prompts. A mode and plain decoding are drawn alike, group
by group, so what disturbed both cancels.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from domino_jax.decoding.acceptance import accept_histogram, accept_rates, acceptance_record
from domino_jax.decoding.generate import Clock
from domino_jax.decoding.settings import BASELINE
from domino_jax.evals.bootstrap import Interval, interval, pooled

LISTED = 100  # divergences in a report; all are counted


@dataclasses.dataclass
class ModeRun:
    """Sums, and a few numbers per answer; no text and no list of tokens.

    clock: sums over all groups.  histogram: rounds by the tokens they emitted.
    emitted, rounds: per answer, tokens emitted in rounds and how many rounds.
    group_seconds, group_tokens: per group of prompts that ran together, the loop's seconds and tokens.
    compared: answers compared with plain decoding's (None where that was not done); diverged, near_ties: how many
        differ.
    """

    clock: Clock = dataclasses.field(default_factory=Clock)
    tokens: int = 0
    stopped: int = 0
    histogram: Counter = dataclasses.field(default_factory=Counter)
    emitted: list[int] = dataclasses.field(default_factory=list)
    rounds: list[int] = dataclasses.field(default_factory=list)
    group_seconds: list[float] = dataclasses.field(default_factory=list)
    group_tokens: list[int] = dataclasses.field(default_factory=list)
    compared: int | None = None
    diverged: int = 0
    near_ties: int = 0
    first_divergences: list[Mapping] = dataclasses.field(default_factory=list)

    def add(self, rows: Sequence[Mapping[str, Any]], clock: Clock, differing: Sequence[Mapping] | None) -> None:
        """Counts a group by its rows of generations.jsonl. differing: from plain decoding's; None: not compared."""
        for row in rows:
            self.tokens += len(row["token_ids"])
            self.stopped += row["finish_reason"] == "stop"
            self.histogram.update(row["accept_lengths"])
            self.emitted.append(sum(row["accept_lengths"]))
            self.rounds.append(len(row["accept_lengths"]))
        add_clock(self.clock, clock)
        self.group_seconds.append(clock.decode_seconds)
        self.group_tokens.append(clock.decode_tokens)
        if differing is not None:
            self.compared = (self.compared or 0) + len(rows)
            self.diverged += len(differing)
            self.near_ties += sum(entry["near_tie"] for entry in differing)
            self.first_divergences += differing[: LISTED - len(self.first_divergences)]

    @property
    def tokens_per_second(self) -> float | None:
        return ratio(self.clock.decode_tokens, self.clock.decode_seconds)

    @property
    def output_tokens_per_second(self) -> float | None:
        """All tokens over the time of prefills and loop, as a client sees it."""
        return ratio(self.tokens, self.clock.prefill_seconds + self.clock.decode_seconds)

    def identical(self) -> dict[str, Any] | None:
        """How many answers are equal to plain decoding's, and how the others differ; None if they were not compared."""
        if self.compared is None:
            return None
        return {
            "same": self.compared - self.diverged,
            "of": self.compared,
            "near_ties": self.near_ties,
            "violations": self.diverged - self.near_ties,
            "first_divergences": self.first_divergences,
        }


def figures_of(runs: Mapping[str, ModeRun], widths: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """By mode the figures of one set of prompts; JSON values only.

    widths: by mode that drafts, the tokens that a round can emit at most.
    """
    plain, widths = runs[BASELINE] if BASELINE in runs else None, {BASELINE: 1, **widths}
    return {mode: _figures(run, widths[mode], plain) for mode, run in runs.items()}


def _figures(run: ModeRun, width: int, plain: ModeRun | None) -> dict[str, Any]:
    clock, histogram = run.clock, accept_histogram(run.histogram, width)
    rates, conditional = accept_rates(histogram)
    means = [emitted / rounds for emitted, rounds in zip(run.emitted, run.rounds, strict=True) if rounds]
    figures = {
        "answers": len(run.rounds),
        "tokens": run.tokens,
        "decode_tokens": clock.decode_tokens,
        "stopped": run.stopped,
        "seconds": clock.decode_seconds,
        "tokens_per_second": run.tokens_per_second,
        "output_tokens_per_second": run.output_tokens_per_second,
        "milliseconds_per_token": ratio(clock.decode_seconds * 1e3, clock.decode_tokens),
        "speedup": ratio(run.tokens_per_second, plain and plain.tokens_per_second),
        "speedup_end_to_end": ratio(run.output_tokens_per_second, plain and plain.output_tokens_per_second),
        "prefill_seconds": clock.prefill_seconds,
        "compile_seconds": clock.compile_seconds,
        "rounds": sum(run.rounds),
        "drafts_per_round": ratio(clock.drafts, sum(run.rounds)),
        "tau_pooled": ratio(sum(run.emitted), sum(run.rounds)),
        "tau_per_prompt": ratio(sum(means), len(means)),
        "accept_histogram": histogram,
        "acceptance": acceptance_record(run.histogram, clock.drafts),
        "accept_rate_by_position": rates,
        "conditional_accept_rate_by_position": conditional,
        "identical": run.identical(),
        "intervals": intervals(run, plain if plain is not run else None),
    }
    if clock.widths:
        figures["widths"] = {"rounds": dict(clock.widths), "exploring_seconds": clock.exploring_seconds}
    return figures


def intervals(run: ModeRun, plain: ModeRun | None) -> dict[str, Interval]:
    """[low, high] of tau_pooled, tau_per_prompt, tokens_per_second and speedup; None where nothing can be drawn."""
    emitted, rounds = np.array(run.emitted, float), np.array(run.rounds, float)
    means, drafted = np.divide(emitted, rounds, out=np.zeros_like(emitted), where=rounds > 0), rounds > 0
    group = run.group_tokens, run.group_seconds
    return {
        "tau_pooled": interval(pooled, emitted, rounds),
        "tau_per_prompt": interval(pooled, means, drafted),
        "tokens_per_second": interval(pooled, *group),
        "speedup": interval(_speedup, *group, plain.group_tokens, plain.group_seconds) if plain else None,
    }


def _speedup(tokens: np.ndarray, seconds: np.ndarray, plain_tokens: np.ndarray, plain_seconds: np.ndarray, axis: int):
    return pooled(tokens, seconds, axis) / pooled(plain_tokens, plain_seconds, axis)


def averages(tasks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """By mode the mean over tasks of speed-up and τ, as the paper's tables have it; each task weighs the same."""
    means = {}
    for mode in next(iter(tasks.values()), {}):
        means[mode] = {}
        for key in ("speedup", "tau_pooled", "tau_per_prompt"):
            values = [figures[mode][key] for figures in tasks.values()]
            means[mode][key] = None if None in values else sum(values) / len(values)
    return means


def add_clock(total: Clock, part: Clock) -> None:
    """Adds every figure of `part` to `total`."""
    for field in dataclasses.fields(Clock):
        setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))


def ratio(above: float | None, below: float | None) -> float | None:
    """None where there is nothing to divide by."""
    return above / below if above is not None and below else None
