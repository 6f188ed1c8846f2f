"""The sections and the pictures in docs/ of one arm of benchmarks/studies/heads.py, from its recorded figures."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.document import say_seeds, table_lines
from benchmarks.studies.drafter_decoding import CURVE_PROMPTS, PUBLISHED
from benchmarks.studies.head_variants import BACKBONE, DRAFT, TREE, Arm
from domino_jax.evals.plots import label_ends
from domino_jax.evals.summary import ratio_interval, resampled_sums
from domino_jax.runtime.figures import figure_of, tidy

NOTHING = "–"
MILLION, TERA, MEGA = 1e6, 1e12, 1e6
TEMPERATURES = {"greedy": "T = 0", "sampled": "T = 1"}
RECALLS = ("1", "16")
FEWEST_ROUNDS = 30  # that a drawn share is of; with fewer it is noise
LABEL = 0.052  # of the height of a picture's axes, for a line of text

Seeds = Sequence[Mapping[str, Any]]


def section(recorded: Mapping[str, Any], arm: Arm) -> str:
    """The Markdown of one arm.

    recorded: what benchmarks/studies/heads.py writes to figures_ARM.json.
    """
    name, width, rows = recorded["arm"], recorded["width"], recorded["rows"]
    drafters, timings = recorded["drafters"], recorded["timings"]
    training, held_out = rows["training"], rows["held_out"]
    seeds = ", ".join(map(str, recorded["seeds"]))
    parts = [
        f"## {arm.title}",
        f"```\n{recorded['command']}\n```",
        f"{arm.says} The verifying pass has {width} rows, so every τ is at most {width}. In the last column it is at "
        f"most one more than the drafts in parentheses. Training seeds: {seeds} (mean ± half the range where there are "
        "several); 95 % intervals over prompts are in brackets.",
        "\n".join(quality(drafters)),
        "What was trained, and with how much. FLOPs are those of the products in the step's program, the target's pass "
        "and the optimizer included. Memory is the compiler's peak of a step:",
        "\n".join(efforts(drafters)),
        f"![τ against training FLOPs](heads_flops_{name}.png)",
        "The points of a line are the checkpoints of its runs and their end; the learning rate falls until then. "
        f"They are τ of the first {min(recorded['prompts'], CURVE_PROMPTS)} held-out prompts, so they differ from the "
        "table.",
        "What a draft costs, and what a round is worth: chains at temperature 0 unless a column names something else, "
        f"one request at a time in float32, drafters of seed {recorded['seeds'][0]}. A plain step takes "
        f"{timings['step_ms']:.2f} ms; plain decoding does {timings['plain']['greedy']:,.0f} tokens/s at temperature 0 "
        f"and {timings['plain']['sampled']:,.0f} at 1. Tokens/s are of {timings['prompts']} prompts. "
        f"{timings['conditions']}",
        "\n".join(costs(drafters, timings)),
        f"![acceptance by position](heads_positions_{name}.png)",
        f"A line ends where fewer than {FEWEST_ROUNDS} rounds of all seeds reached the draft. All positions, and the "
        "recall of the base logits, are on [a separate page](results_positions.md).",
        "\n".join(f"- {line}" for line in controls(recorded)),
        f"Training rows: {training['count']:,}, the target's own answers (SHA-256 of their token ids in order "
        f"{training['sha256'][:16]}); held-out prompts: {held_out['count']:,} ({held_out['sha256'][:16]}). "
        f"{recorded['conditions']}",
    ]
    return "\n\n".join(parts) + "\n"


def positions_section(recorded: Mapping[str, Any], arm: Arm) -> str:
    """The Markdown of one arm by position; recorded: as in `section`."""
    table = positions(recorded["drafters"], recorded["width"])
    return "\n\n".join([f"## {arm.title}", "\n".join(table)]) + "\n"


# ---------------------------------------------------------------------------------------------------- tables


def quality(drafters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """τ by decoding, and beside it the accepted length with the true tokens given."""
    heading = ["drafter", "teacher-forced, training rows", "teacher-forced, held-out"]
    heading += [f"τ, {name}" for name in TEMPERATURES.values()]
    heading += [f"τ per prompt, {name}" for name in TEMPERATURES.values()] + ["τ of its backbone, T = 0"]
    heading += [f"τ of a tree, {name}" for name in TEMPERATURES.values()] + ["τ at its published drafts"]
    body = []
    for one in drafters.values():
        seeds = one["seeds"]
        forced = [seed["blocks"]["accept_len"] for seed in seeds if seed["blocks"]]
        body.append(
            [
                one["title"],
                *(average(values) for values in ([seed["teacher_forced"] for seed in seeds], forced)),
                *(say_tau(seeds, kind, DRAFT) for kind in TEMPERATURES),
                *(say_per_prompt(seeds, kind, DRAFT) for kind in TEMPERATURES),
                say_tau(seeds, "greedy", BACKBONE, interval=False),
                *(say_tau(seeds, kind, TREE) for kind in TEMPERATURES),
                say_published(seeds),
            ]
        )
    return table_lines(heading, body)


def efforts(drafters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was trained, and with how much."""
    columns = {
        "trained": ("trained parameters, M", MILLION, 2),
        "stored": ("stored, M", MILLION, 2),
        "steps": ("steps", 1, 0),
        "predictions": ("supervised predictions, M", MILLION, 2),
        "flops": ("training TFLOPs", TERA, 2),
        "train_bytes": ("peak memory, MB", MEGA, 0),
    }
    body = [
        [
            one["title"],
            *(f"{mean(one['seeds'], key) / unit:,.{digits}f}" for key, (_, unit, digits) in columns.items()),
        ]
        for one in drafters.values()
    ]
    return table_lines(["drafter", *(heading for heading, _, _ in columns.values())], body)


def costs(drafters: Mapping[str, Mapping[str, Any]], timings: Mapping[str, Any]) -> list[str]:
    """What a draft reads, a round takes and decoding gains."""
    parts = ("draft", "head", "verify", "commit", "round")
    heading = ["drafter", "MB read per draft", "peak memory, MB", *(f"{part}, ms" for part in parts)]
    heading += ["round ÷ step = break-even τ", "tokens/s", "tokens/s, tree"]
    heading += ["speed-up", "speed-up, tree", "speed-up, T = 1"]
    plain, body = timings["plain"], []
    for name, one in drafters.items():
        timed = timings["drafters"][name]
        rates = timed["tokens_per_second"]
        greedy = [rates["greedy"][mode] if mode in rates["greedy"] else None for mode in (DRAFT, TREE)]
        ratios = [*(quotient(rate, plain["greedy"]) for rate in greedy)]
        ratios.append(quotient(rates["sampled"][DRAFT], plain["sampled"]))
        body.append(
            [
                one["title"],
                f"{mean(one['seeds'], 'draft_bytes') / MEGA:.2f}",
                f"{timed['peak_bytes'] / MEGA:.0f}",
                *(say(timed["split"][part], ".2f") for part in parts),
                say(timed["break_even"], ".2f"),
                *(say(rate, ",.0f") for rate in greedy),
                *(say(value, ".2f") for value in ratios),
            ]
        )
    return table_lines(heading, body)


def positions(drafters: Mapping[str, Mapping[str, Any]], width: int) -> list[str]:
    heading = ["drafter", "", *(str(place) for place in range(1, width + 1))]
    body = []
    for one in drafters.values():
        seeds = one["seeds"]
        kinds = {f"accepted, {name}": conditional(seeds, kind) for kind, name in TEMPERATURES.items()}
        kinds |= {f"rounds, {name}": shares_of_rounds(seeds, kind) for kind, name in TEMPERATURES.items()}
        recorded = [seed["blocks"]["recall"] for seed in seeds if seed["blocks"]]
        for k in RECALLS:
            kinds[f"recall@{k}"] = by_place([recall[k] for recall in recorded])
        for kind, values in kinds.items():
            if values:
                cells = [*(f"{value:.2f}" for value in values[:width]), *[NOTHING] * (width - len(values))]
                body.append([one["title"], kind, *cells])
    return table_lines(heading, body, texts=2)


# --------------------------------------------------------------------------------------------------- figures


def mean(seeds: Seeds, key: str) -> float:
    return statistics.fmean(seed[key] for seed in seeds)


def average(values: Sequence[float | None]) -> str:
    """The mean of those that were measured."""
    measured = [value for value in values if value is not None]
    return f"{statistics.fmean(measured):.2f}" if measured else NOTHING


def say(value: float | None, form: str) -> str:
    return NOTHING if value is None else f"{value:{form}}"


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def of_mode(seeds: Seeds, kind: str, mode: str) -> list[Mapping[str, Any]]:
    return [seed[kind]["modes"][mode] for seed in seeds if mode in seed[kind]["modes"]]


def taus(seeds: Seeds, kind: str, mode: str) -> list[float]:
    """Pooled τ of each seed; none without this mode."""
    return [sum(one["emitted"]) / sum(one["rounds"]) for one in of_mode(seeds, kind, mode) if sum(one["rounds"])]


def say_tau(seeds: Seeds, kind: str, mode: str, interval: bool = True) -> str:
    """Mean ± half the range over the seeds, and the interval over prompts, of which each has all seeds' rounds."""
    values = taus(seeds, kind, mode)
    if not values:
        return NOTHING
    text = say_seeds(values)
    emitted, rounds = summed(seeds, kind, mode)
    found = ratio_interval(*resampled_sums(emitted, rounds)) if interval else None
    return text + (f" [{found[0]:.2f}, {found[1]:.2f}]" if found else "")


def say_per_prompt(seeds: Seeds, kind: str, mode: str) -> str:
    """The mean over answers of each answer's own mean, with its interval over prompts."""
    emitted, rounds = summed(seeds, kind, mode)
    drafted = rounds > 0
    means = np.divide(emitted, rounds, out=np.zeros_like(emitted), where=drafted)
    if not drafted.any():
        return NOTHING
    found = ratio_interval(*resampled_sums(means, drafted))
    return f"{means.sum() / drafted.sum():.2f}" + (f" [{found[0]:.2f}, {found[1]:.2f}]" if found else "")


def summed(seeds: Seeds, kind: str, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens emitted and rounds of each prompt, over all seeds: float64 [P] each."""
    modes = of_mode(seeds, kind, mode)
    return tuple(np.sum([one[key] for one in modes], axis=0, dtype=float) for key in ("emitted", "rounds"))


def say_published(seeds: Seeds) -> str:
    values = taus(seeds, "greedy", PUBLISHED)
    return f"{statistics.fmean(values):.2f} ({seeds[0]['published']})" if values else NOTHING


def conditional(seeds: Seeds, kind: str) -> list[float]:
    return by_place([one["conditional"] for one in of_mode(seeds, kind, DRAFT)])


def rounds_by_length(seeds: Seeds, kind: str) -> Counter[int]:
    """How many rounds of all seeds emitted 1, 2, … tokens."""
    counts = Counter()
    for one in of_mode(seeds, kind, DRAFT):
        counts.update({int(length): count for length, count in one["histogram"].items()})
    return counts


def shares_of_rounds(seeds: Seeds, kind: str) -> list[float]:
    """The share of all seeds' rounds that emitted 1, 2, … tokens."""
    counts = rounds_by_length(seeds, kind)
    total = sum(counts.values())
    return [counts[length] / total for length in range(1, max(counts, default=0) + 1)] if total else []


def by_place(rows: Sequence[Sequence[float | None]]) -> list[float]:
    """Means over the seeds for each place, up to the first that no seed has."""
    found = []
    for place in range(max(map(len, rows), default=0)):
        values = [row[place] for row in rows if place < len(row) and row[place] is not None]
        if not values:
            break
        found.append(statistics.fmean(values))
    return found


def controls(recorded: Mapping[str, Any]) -> list[str]:
    """Sanity rows and equality, one sentence each."""
    seeds = [seed for one in recorded["drafters"].values() for seed in one["seeds"]]
    compared = [
        figures["identical"]
        for seed in seeds
        for kind in TEMPERATURES
        for figures in seed[kind]["modes"].values()
        if figures["identical"]
    ]
    same, of, violations = (sum(one[key] for one in compared) for key in ("same", "of", "violations"))
    plain = [seed["greedy"]["plain"] for seed in seeds]
    equal = sum(one == plain[0] for one in plain)
    return [
        f"Plain against plain: {equal} of {len(plain)} greedy plain decodings gave the same texts.",
        f"Drafted against plain: {same:,} of {of:,} texts are equal; {violations} of the others differ by more than a "
        "near tie.",
        f"Oracle: with every draft accepted τ is {recorded['oracle']:.2f} of at most {recorded['width']}; ends of "
        "texts cut the last rounds.",
    ]


# -------------------------------------------------------------------------------------------------- pictures


def pictures(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """File name → picture."""
    name = recorded["arm"]
    return {
        f"heads_flops_{name}.png": over_flops(recorded["drafters"]),
        f"heads_positions_{name}.png": over_positions(recorded["drafters"]),
    }


def over_flops(drafters: Mapping[str, Mapping[str, Any]]):
    """τ of the checkpoints against the FLOPs so far, the mean of the seeds."""
    figure = figure_of(9, 5)
    axes = figure.add_subplot()
    for one in drafters.values():
        curves = [seed["curve"] for seed in one["seeds"] if seed["curve"]]
        points = [
            [statistics.fmean(column) for column in zip(*pairs, strict=True)] for pairs in zip(*curves, strict=False)
        ]
        if points:
            flops, values = zip(*points, strict=True)
            tera = [value / TERA for value in flops]
            axes.plot(tera, values, **look(one), marker="o", markersize=3)
    axes.set(xlabel="training TFLOPs", ylabel="τ by decoding held-out prompts, T = 0", xlim=(0, None))
    tidy(axes, legend=False)
    label_ends(axes, LABEL, right=1.02)
    return figure


def over_positions(drafters: Mapping[str, Mapping[str, Any]]):
    """Conditional acceptance of chains; rows with the common loss are in the table alone, or nothing could be seen."""
    figure = figure_of(9, 5)
    axes = figure.add_subplot()
    for one in drafters.values():
        lengths = rounds_by_length(one["seeds"], "greedy")
        rates = [
            rate
            for place, rate in enumerate(conditional(one["seeds"], "greedy"), 1)
            if sum(count for length, count in lengths.items() if length >= place) >= FEWEST_ROUNDS
        ]
        if rates and not has_common_loss(one):
            axes.plot(range(1, len(rates) + 1), rates, **look(one))
    axes.set(xlabel="draft", ylabel="accepted, given that all before were; T = 0", ylim=(0, 1))
    tidy(axes, legend=False)
    label_ends(axes, LABEL, right=1.02)
    return figure


def look(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "color": one["colour"],
        "linestyle": "--" if has_common_loss(one) else "-",
        "label": one["title"],
    }


def has_common_loss(one: Mapping[str, Any]) -> bool:
    return one["title"].endswith("common loss")
