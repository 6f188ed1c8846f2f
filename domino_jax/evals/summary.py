"""From sums to figures: rates, τ, acceptance, equal outputs and 95 % intervals of one set of prompts.

Intervals are by the bootstrap (bootstrap.py). τ is resampled over answers. Rates and speed-ups are resampled over
groups, the prompts that ran together: at batch size 1 single prompts. A mode and the baseline are drawn alike, group by
group, so what disturbed both cancels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from domino_jax.decoding.acceptance import accept_histogram, accept_rates, acceptance_record
from domino_jax.decoding.settings import BASELINE
from domino_jax.evals.bootstrap import Interval, interval, pooled
from domino_jax.evals.lanes import ModeRun
from domino_jax.evals.run_info import RunInfo


def figures_of(runs: Mapping[str, ModeRun], info: RunInfo) -> dict[str, dict[str, Any]]:
    """The figures of one set of prompts by mode, including speed-ups and intervals."""
    baseline = runs[BASELINE] if BASELINE in runs else None
    widths = {BASELINE: 1, **info.round_widths}
    modes = {mode: _mode_figures(run, widths[mode]) for mode, run in runs.items()}
    speedups = {"speedup": "tokens_per_second", "speedup_end_to_end": "output_tokens_per_second"}
    for mode, figures in modes.items():
        for name, rate in speedups.items():
            figures[name] = ratio(figures[rate], modes[BASELINE][rate]) if baseline else None
        figures["drafts_per_round"] = ratio(runs[mode].clock.drafts, figures["rounds"]) if mode != BASELINE else None
        if clock := runs[mode].clock if runs[mode].clock.widths else None:
            figures["widths"] = {"rounds": dict(clock.widths), "exploring_seconds": clock.exploring_seconds}
        figures["intervals"] = intervals(runs[mode], baseline if mode != BASELINE else None)
    return modes


def _mode_figures(run: ModeRun, width: int) -> dict[str, Any]:
    clock, histogram = run.clock, accept_histogram(run.histogram, width)
    plain, conditional = accept_rates(histogram)
    means = [emitted / rounds for emitted, rounds in zip(run.emitted, run.rounds, strict=True) if rounds]
    return {
        "answers": run.answers,
        "tokens": run.tokens,
        "decode_tokens": clock.decode_tokens,
        "seconds": clock.decode_seconds,
        "tokens_per_second": ratio(clock.decode_tokens, clock.decode_seconds),
        "output_tokens_per_second": ratio(run.tokens, clock.prefill_seconds + clock.decode_seconds),
        "milliseconds_per_token": ratio(clock.decode_seconds * 1e3, clock.decode_tokens),
        "prefill_seconds": clock.prefill_seconds,
        "compile_seconds": clock.compile_seconds,
        "rounds": sum(histogram.values()),
        "tau_pooled": ratio(sum(run.emitted), sum(run.rounds)),
        "tau_per_prompt": ratio(sum(means), len(means)),
        "accept_histogram": histogram,
        "acceptance": acceptance_record(run.histogram, clock.drafts),
        "accept_rate_by_position": plain,
        "conditional_accept_rate_by_position": conditional,
        "stopped": run.stopped,
    }


def identical_outputs(runs: Mapping[str, ModeRun]) -> dict[str, dict[str, Any]]:
    """By mode that was compared with the baseline: how many answers are equal, and what the others are."""
    return {
        mode: {
            "same": run.compared - run.diverged,
            "of": run.compared,
            "near_ties": run.near_ties,
            "violations": run.diverged - run.near_ties,
            "first_divergences": list(run.first_divergences),
        }
        for mode, run in runs.items()
        if run.compared is not None
    }


def averages(tasks: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float | None]]:
    """By mode the mean over tasks of speed-up and τ, as the paper's tables have it; each task weighs the same."""
    means = {}
    for mode in next(iter(tasks.values()), {}):
        means[mode] = {}
        for key in ("speedup", "tau_pooled", "tau_per_prompt"):
            values = [figures[mode][key] for figures in tasks.values()]
            means[mode][key] = None if None in values else sum(values) / len(values)
    return means


def ratio(above: float | None, below: float | None) -> float | None:
    """None where there is nothing to divide by."""
    return above / below if above is not None and below else None


# ---------------------------------------------------------------------------------------------------- intervals


def intervals(run: ModeRun, baseline: ModeRun | None) -> dict[str, Interval]:
    """[low, high] of tau_pooled, tau_per_prompt, tokens_per_second and speedup; None where nothing can be drawn."""
    emitted, rounds = np.array(run.emitted, float), np.array(run.rounds, float)
    means, drafted = np.divide(emitted, rounds, out=np.zeros_like(emitted), where=rounds > 0), rounds > 0
    group = run.group_tokens, run.group_seconds
    return {
        "tau_pooled": interval(pooled, emitted, rounds),
        "tau_per_prompt": interval(pooled, means, drafted),
        "tokens_per_second": interval(pooled, *group),
        "speedup": interval(_speedup, *group, baseline.group_tokens, baseline.group_seconds) if baseline else None,
    }


def _speedup(tokens: np.ndarray, seconds: np.ndarray, plain_tokens: np.ndarray, plain_seconds: np.ndarray, axis: int):
    return pooled(tokens, seconds, axis) / pooled(plain_tokens, plain_seconds, axis)
