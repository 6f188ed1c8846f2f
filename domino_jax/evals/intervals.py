"""95 % intervals by the bootstrap: the same figures over prompts drawn again, with replacement, from those measured.

τ is resampled over answers. Rates and speed-ups are resampled over groups, the prompts that ran together: at batch size
1 single prompts. A mode and the baseline are drawn alike, group by group, so what disturbed both cancels.
"""

from collections.abc import Sequence

import numpy as np

from domino_jax.evals.lanes import ModeRun

LEVEL = 0.95
RESAMPLES = 2000
SEED = 0
CHUNK = 1 << 20  # draws in memory at once, whatever the number of prompts

Interval = list[float] | None


def mode_intervals(run: ModeRun, baseline: ModeRun | None) -> dict[str, Interval]:
    """[low, high] of tau_pooled, tau_per_prompt, tokens_per_second and speedup; None where nothing can be drawn."""
    emitted, rounds = np.asarray(run.emitted, float), np.asarray(run.rounds, float)
    drafted = rounds > 0
    means = np.divide(emitted, rounds, out=np.zeros_like(emitted), where=drafted)
    pooled, per_prompt = ratio_intervals([(emitted, rounds), (means, drafted.astype(float))])
    rate = (np.asarray(run.group_tokens, float), np.asarray(run.group_seconds, float))
    found = {"tau_pooled": pooled, "tau_per_prompt": per_prompt, "tokens_per_second": ratio_intervals([rate])[0]}
    return {**found, "speedup": speedup_interval(rate, baseline) if baseline is not None else None}


def speedup_interval(rate: tuple[np.ndarray, np.ndarray], baseline: ModeRun) -> Interval:
    """Of (tokens / seconds) over the baseline's, both summed over the same draws of groups; rate has a row a group."""
    tokens, seconds = np.asarray(baseline.group_tokens, float), np.asarray(baseline.group_seconds, float)
    sums = resampled_sums(np.stack([*rate, tokens, seconds], axis=1))
    return None if sums is None else _interval(sums[:, 0] * sums[:, 3], sums[:, 1] * sums[:, 2])


def ratio_intervals(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Interval]:
    """Per pair of float [N] arrays the interval of sum(above) / sum(below)."""
    sums = resampled_sums(np.stack([column for pair in pairs for column in pair], axis=1))
    if sums is None:
        return [None] * len(pairs)
    return [_interval(sums[:, 2 * place], sums[:, 2 * place + 1]) for place in range(len(pairs))]


def resampled_sums(values: np.ndarray) -> np.ndarray | None:
    """Sums float64 [RESAMPLES, K] over N rows of values [N, K] drawn with replacement; None for fewer than 2 rows."""
    count = len(values)
    if count < 2:
        return None
    random = np.random.default_rng(SEED)
    sums, at_once = [], max(1, CHUNK // count)
    for start in range(0, RESAMPLES, at_once):
        drawn = random.integers(count, size=(min(at_once, RESAMPLES - start), count))
        sums.append(np.stack([column[drawn].sum(axis=1) for column in values.T], axis=1))
    return np.concatenate(sums)


def _interval(above: np.ndarray, below: np.ndarray) -> Interval:
    fine = below > 0  # a draw of prompts without a round, or without a measurable time, has no ratio
    if not fine.any():
        return None
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(above[fine] / below[fine], [tail, 100 - tail])
    return [float(low), float(high)]
