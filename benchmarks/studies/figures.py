"""The rows of a study's tables, from the evaluations of its seeds, and their place in a page.

An evaluation is {"drafters": figures by name, "pairs": by the names of two} of evaluation.json.
"""

import argparse
import itertools
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from scipy import stats

from benchmarks.tables import DATA, conditions, markdown, put_section, with_spread, write_csv
from domino_jax.evals import plots

Figures = Mapping[str, Any]
COSTS = {"tau_in_time": "after equal time", "speed": "speed-up, CPU", "speed_h200": "by bytes, H200"}
SEEDS_SAY = """, from the lowest to the highest end of the seeds; those of a lead are over answers and seeds"""
COSTS_SAY = """After equal time: τ of the run's own evaluations (64 other answers) when the cheapest training ends.
    Speed-up: over plain decoding, τ ÷ a round in plain steps, by seconds on this CPU and by the bytes of 8B on an H200
    ([compilers](compilers.md#the-head-in-a-round)), there in blocks of 16 (EAGLE-3: 7 drafts), with τ of 7 drafts."""
PARTS = ("kind of prompt", "tokens of the prompt, from")  # of the task of an answer, "KIND, TOKENS"


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
            # The last ones stay: all drafts.
            row[f"tau_{end}"], row[f"mean_{end}"] = f"{with_spread(taus)}{brackets(low, high)}", statistics.fmean(taus)
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


def group_rows(
    titles_of: Mapping[str, str],
    evaluations: Mapping[int, Sequence[Figures]],
    tokens: Mapping[int, Mapping[str, int]],
) -> list[dict[str, Any]]:
    """τ with all drafts by kind of prompt and by its length: the mean of the seeds, the lowest and the highest.

    tokens: that rounds emitted, by temperature and task. The rounds of a task are its tokens ÷ its τ.
    """
    rows = []
    for temperature, seeds in evaluations.items():
        emitted = tokens[temperature]
        for (name, title), (place, part) in itertools.product(titles_of.items(), enumerate(PARTS)):
            for group in dict.fromkeys(task.split(", ")[place] for task in emitted):
                tasks = [task for task in emitted if task.split(", ")[place] == group]
                taus = [_pooled(seed["drafters"][name]["tasks"], tasks, emitted) for seed in seeds]
                row = {"drafter": title, "temperature": temperature, "by": part, "group": group}
                row |= {"tokens": sum(map(emitted.get, tasks)), "tau": statistics.fmean(taus)}
                rows.append(row | {"low": min(taus), "high": max(taus)})
    return rows


def _pooled(figures: Mapping[str, Any], tasks: Sequence[str], emitted: Mapping[str, int]) -> float:
    rounds = [emitted[task] / list(figures[task]["tau"].values())[-1] for task in tasks]
    return sum(map(emitted.get, tasks)) / sum(rounds)


def draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """τ at temperature 0 by the drafts of a round: a line for each training's last row, and the band of its
    intervals."""
    bands = {}
    for row in {row["training"]: row for row in rows}.values():
        widths = [int(key.split("_")[1]) for key in row if key.startswith("low_") and key.endswith("_t0")]
        bands[row["drafter"]] = [
            (width, *(row[f"{key}_{width}_t0"] for key in ("tau", "low", "high"))) for width in widths
        ]
    lines = {name: [band[:2] for band in points] for name, points in bands.items()}
    figure = plots.draw_lines(lines, title="τ at temperature 0", xlabel="drafts of a round", ylabel="tokens per round")
    axes = figure.axes[0]
    for line, points in zip(axes.get_lines(), bands.values(), strict=True):
        widths, _, low, high = zip(*points, strict=True)
        if None not in low:
            axes.fill_between(widths, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


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


# ------------------------------------------------------------------------------------------------------- the page


def write(
    options: argparse.Namespace,
    overrides: Sequence[str],
    section: Mapping[str, str],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Puts the tables and the picture into the page and the data file beside it, and prints the text."""
    name, page, first = section["name"], options.page, rows[0]["drafter"]
    chosen = {flag: ",".join(map(str, vars(options)[flag])) for flag in ("seeds", "rates", "only")}
    words = [f"python -m {section['module']} --workdir=WORKDIR --steps={options.steps}"]
    words += [f"--{flag}={value}" for flag, value in chosen.items() if value]
    words += ["--costs"] * options.costs + ([] if options.small else list(overrides))
    write_csv(page.parent / DATA / f"{name}.csv", rows)
    plots.save(page.parent / "images", {f"{name}.png": draw(rows)})
    tables = ""
    for end, costs in (("t0", COSTS if options.costs else {}), ("t1", {})):
        columns = {"drafter": f"T = {end[1]}", "weights_m": "weights, M", f"tau_1_{end}": "τ, 1 draft"}
        columns |= {f"tau_{end}": "all drafts", f"backbone_{end}": "its backbone", f"lead_{end}": f"{first}'s lead"}
        tables += f"{markdown(rows, columns | costs)}\n\n"
    says = f"""{section["says"]} A lead is τ of {first} minus τ of the row, with the most drafts that both have.
        Brackets: 95 % intervals by the bootstrap over answers{SEEDS_SAY if len(options.seeds) > 1 else ""}; bold: the
        interval has no 0, and all seeds agree.
        {COSTS_SAY if options.costs else ""} Training seeds: {chosen["seeds"]}.
        {conditions(("jax", "flax", "optax"))}"""
    files = {end: f"data/{name}{end}.csv" for end in ("", "_pairs", "_groups", *(["_rates"] if options.rates else []))}
    titles = {"": "all columns", "_pairs": "all pairs", "_groups": "by kind and length of prompts"}
    links = ", ".join(f"[{titles.get(end, 'learning rates')}]({file})" for end, file in files.items())
    text = f"""## {section["title"]}

```
{" ".join(words)}
```

{textwrap.fill(" ".join(says.split()), 120)}

{tables}![τ by the drafts of a round](images/{name}.png)

Data: {links}."""
    put_section(page, name, text)
    print(text, flush=True)
