"""The rows of a study's tables, from the evaluations of its seeds.

An evaluation is {"drafters": figures by name, "pairs": by the names of two} of evaluation.json.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from benchmarks.tables import with_spread

Figures = Mapping[str, Any]


def figures_of(name: str, evaluations: Mapping[int, Sequence[Figures]]) -> dict[str, Any]:
    """The columns of one variant: by temperature τ at each number of drafts, the first variant's lead, acceptance."""
    row: dict[str, Any] = {}
    for temperature, seeds in evaluations.items():
        chosen, end = [seed["drafters"][name] for seed in seeds], f"t{temperature}"
        for width in chosen[0]["tau"]:
            taus = [one["tau"][width] for one in chosen]
            low, high = envelope([one["intervals"][width] for one in chosen])
            row |= {
                f"tau_{width}_{end}": statistics.fmean(taus),
                f"low_{width}_{end}": low,
                f"high_{width}_{end}": high,
            }
            row[f"tau_{end}"] = f"{with_spread(taus)}{brackets(low, high)}"  # the last one stays: all drafts
        if chosen[0]["tau_backbone"] is not None:
            row[f"backbone_{end}"] = statistics.fmean(one["tau_backbone"] for one in chosen)
        first = next(iter(seeds[0]["drafters"]))
        if name != first:
            lead = list(leads(seeds, (first, name)).values())[-1]
            row[f"lead_{end}"] = say_lead(**lead)
            row |= {f"lead_{key}_{end}": value for key, value in lead.items()}
        for place in range(len(chosen[0]["accept_by_position"])):
            row[f"accept_{place + 1}_{end}"] = statistics.fmean(one["accept_by_position"][place] for one in chosen)
    return row


def leads(seeds: Sequence[Figures], pair: tuple[str, str]) -> dict[str, dict[str, Any]]:
    """By drafts of a round, τ of the first drafter minus τ of the second, and whether the sign is sure.

    "low", "high": by answers within each seed, from the lowest to the highest end. "seeds_low", "seeds_high": over
    answers and seeds, None for one seed. "real": no interval has 0, and the sign is that of every seed.
    """
    table = {}
    for width in seeds[0]["pairs"][pair]:
        each = [seed["pairs"][pair][width] for seed in seeds]
        low, high = envelope([one["interval"] for one in each])
        differences = [one["difference"] for one in each]
        mean, around = statistics.fmean(differences), None if low is None else spread_of(each)
        real = low is not None and not low <= 0 <= high and (around is None or abs(mean) > around)
        ends = {"seeds_low": None, "seeds_high": None}
        ends = ends if around is None else {"seeds_low": mean - around, "seeds_high": mean + around}
        table[width] = {"difference": mean, "low": low, "high": high, **ends, "real": real}
    return table


def spread_of(each: Sequence[Mapping[str, Any]]) -> float | None:
    """Half of the 95 % interval over answers and seeds of a mean difference; None for one seed.

    The seeds are judged on the same answers, so the variance of the answers does not fall with their number: that of
    the mean is the variance between seeds ÷ seeds + the mean variance of a seed's bootstrap, by Student's t.
    """
    if len(each) < 2:
        return None
    between = statistics.variance([one["difference"] for one in each]) / len(each)
    within = statistics.fmean(((one["interval"][1] - one["interval"][0]) / 3.92) ** 2 for one in each)
    return stats.t.ppf(0.975, len(each) - 1) * math.sqrt(between + within)


def envelope(intervals: Sequence[Sequence[float] | None]) -> tuple[float | None, float | None]:
    """From the lowest to the highest end of the seeds' intervals: a sign that it leaves sure is sure in each seed."""
    if None in intervals:
        return None, None
    lows, highs = zip(*intervals, strict=True)
    return min(lows), max(highs)


def pair_rows(titles_of: Mapping[str, str], evaluations: Mapping[int, Sequence[Figures]]) -> list[dict[str, Any]]:
    """A row for each two variants, temperature and number of drafts that both have."""
    rows = []
    for temperature, seeds in evaluations.items():
        for pair in seeds[0]["pairs"]:
            titles = dict(zip(("first", "second"), (titles_of[name] for name in pair), strict=True))
            for width, lead in leads(seeds, pair).items():
                rows.append({**titles, "temperature": temperature, "drafts": int(width), **lead})
    return rows


def brackets(low: float | None, high: float | None, form: str = ".2f") -> str:
    return "" if low is None else f" ({low:{form}} to {high:{form}})"


def say_lead(
    difference: float,
    low: float | None,
    high: float | None,
    seeds_low: float | None,
    seeds_high: float | None,
    real: bool,
) -> str:
    """Bold where the sign is sure; the brackets are over answers and seeds, over answers for one seed."""
    mark = "**" if real else ""
    ends = (low, high) if seeds_low is None else (seeds_low, seeds_high)
    return f"{mark}{difference:+.2f}{mark}{brackets(*ends, '+.2f')}"
