"""The section of docs/results.md and the pictures of one arm of benchmarks/heads.py, from its recorded figures."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.head_variants import BACKBONE, DRAFT, PLAIN, TREE, Arm
from benchmarks.study import table_lines
from domino_jax.evals.plots import label_ends
from domino_jax.evals.summary import ratio_interval, resampled_sums
from domino_jax.runtime.figures import figure_of, tidy

NOTHING = "–"
MILLION, TERA, MEGA = 1e6, 1e12, 1e6
TEMPERATURES = {"greedy": "T = 0", "sampled": "T = 1"}
RECALLS = ("1", "16")

Seeds = Sequence[Mapping[str, Any]]


def section(recorded: Mapping[str, Any], arm: Arm) -> str:
    """The Markdown of one arm.

    recorded: what benchmarks/heads.py writes to figures_ARM.json.
    """
    name, width, rows = recorded["arm"], recorded["width"], recorded["rows"]
    drafters = recorded["drafters"]
    training, held_out = rows["training"], rows["held_out"]
    parts = [
        f"### {arm.title}",
        f"```\n{recorded['command']}\n```",
        f"{arm.equal} The verifying pass has {width} rows, so τ is at most {width}; mean ± half the range of "
        f"{len(recorded['seeds'])} training seeds, with 95 % intervals over prompts in brackets.",
        "\n".join(quality(drafters)),
        "What was trained, and with how much; FLOPs are those of the products in the compiled step's program, the "
        "target's pass included:",
        "\n".join(efforts(drafters)),
        f"![τ against training FLOPs](heads_flops_{name}.png)",
        "What a draft costs, and what a round is worth (chains, T = 0):",
        "\n".join(costs(drafters)),
        "By position: acceptance of draft k given that all before it were accepted (chains), and, of block "
        "drafters, the share of labels among the 1 and 16 likeliest tokens of the base logits on held-out answers.",
        "\n".join(positions(drafters, width - 1)),
        f"![acceptance by position](heads_positions_{name}.png)",
        "\n".join(f"- {line}" for line in controls(recorded)),
        f"{recorded['steps']} steps where nothing else is said. Training rows: {training['count']:,}, the target's own "
        f"answers (SHA-256 of their token ids in order {training['sha256'][:16]}); held-out prompts: "
        f"{held_out['count']:,} ({held_out['sha256'][:16]}). {recorded['conditions']}",
    ]
    return "\n\n".join(parts) + "\n"


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
    heading = ["drafter", "trained parameters, M", "stored, M", "steps", "supervised predictions, M", "training TFLOPs"]
    parts = {"trained": MILLION, "stored": MILLION, "steps": 1, "predictions": MILLION, "flops": TERA}
    body = [
        [one["title"], *(f"{mean(one['seeds'], key) / unit:,.{0 if unit == 1 else 2}f}" for key, unit in parts.items())]
        for one in drafters.values()
    ]
    return table_lines(heading, body)


def costs(drafters: Mapping[str, Mapping[str, Any]]) -> list[str]:
    heading = ["drafter", "MB read per draft", "draft, ms", "head, ms", "round, ms", "round ÷ step = break-even τ"]
    heading += ["tokens/s, plain", "tokens/s, chain", "tokens/s, tree", "speed-up, chain", "speed-up, chain, T = 1"]
    body = []
    for one in drafters.values():
        seeds = one["seeds"]
        chains = [seed["greedy"]["modes"][DRAFT] for seed in seeds]
        splits = [chain["time_split"] for chain in chains if chain["time_split"]]
        body.append(
            [
                one["title"],
                f"{mean(seeds, 'draft_bytes') / MEGA:.2f}",
                *(middle([split[part] for split in splits], ".2f") for part in ("draft", "head", "round")),
                middle([chain["break_even_tau"] for chain in chains], ".2f"),
                *(middle(of_mode(seeds, "greedy", mode, "tokens_per_second"), ",.0f") for mode in (PLAIN, DRAFT, TREE)),
                *(middle(of_mode(seeds, kind, DRAFT, "speedup"), ".2f") for kind in TEMPERATURES),
            ]
        )
    return table_lines(heading, body)


def positions(drafters: Mapping[str, Mapping[str, Any]], drafts: int) -> list[str]:
    heading = ["drafter", "", *(str(place) for place in range(1, drafts + 1))]
    body = []
    for one in drafters.values():
        kinds = {f"accepted, {name}": conditional(one["seeds"], kind) for kind, name in TEMPERATURES.items()}
        recorded = [seed["blocks"]["recall"] for seed in one["seeds"] if seed["blocks"]]
        for k in RECALLS:
            kinds[f"recall@{k}"] = by_place([recall[k] for recall in recorded])
        for kind, values in kinds.items():
            if values:
                cells = [*(f"{value:.2f}" for value in values[:drafts]), *[NOTHING] * (drafts - len(values))]
                body.append([one["title"], kind, *cells])
    return table_lines(heading, body, texts=2)


# --------------------------------------------------------------------------------------------------- figures


def mean(seeds: Seeds, key: str) -> float:
    return statistics.fmean(seed[key] for seed in seeds)


def average(values: Sequence[float | None]) -> str:
    """The mean of those that were measured."""
    measured = [value for value in values if value is not None]
    return f"{statistics.fmean(measured):.2f}" if measured else NOTHING


def middle(values: Sequence[float | None], form: str) -> str:
    """The median of those that were measured."""
    measured = [value for value in values if value is not None]
    return f"{statistics.median(measured):{form}}" if measured else NOTHING


def of_mode(seeds: Seeds, kind: str, mode: str, key: str) -> list[float]:
    return [seed[kind]["modes"][mode][key] for seed in seeds if mode in seed[kind]["modes"]]


def taus(seeds: Seeds, kind: str, mode: str) -> list[float]:
    """Pooled τ of each seed; none without this mode."""
    modes = [seed[kind]["modes"][mode] for seed in seeds if kind in seed and mode in seed[kind]["modes"]]
    return [sum(one["emitted"]) / sum(one["rounds"]) for one in modes if sum(one["rounds"])]


def say_tau(seeds: Seeds, kind: str, mode: str, interval: bool = True) -> str:
    """Mean ± half the range over the seeds, and the interval over prompts, of which each has all seeds' rounds."""
    values = taus(seeds, kind, mode)
    if not values:
        return NOTHING
    text = f"{statistics.fmean(values):.2f}"
    if len(values) > 1:
        text += f" ± {(max(values) - min(values)) / 2:.2f}"
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
    modes = [seed[kind]["modes"][mode] for seed in seeds]
    return tuple(np.sum([one[key] for one in modes], axis=0, dtype=float) for key in ("emitted", "rounds"))


def say_published(seeds: Seeds) -> str:
    values = taus(seeds, "published", DRAFT)
    return f"{statistics.fmean(values):.2f} ({seeds[0]['published']['drafts']})" if values else NOTHING


def conditional(seeds: Seeds, kind: str) -> list[float]:
    return by_place(of_mode(seeds, kind, DRAFT, "conditional"))


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
    """τ of evaluations during the training against the FLOPs so far, the mean of the seeds."""
    figure = figure_of(8, 4.5)
    axes = figure.add_subplot()
    for one in drafters.values():
        curves = [seed["curve"] for seed in one["seeds"] if seed["curve"]]
        points = [
            [statistics.fmean(column) for column in zip(*pairs, strict=True)] for pairs in zip(*curves, strict=False)
        ]
        if points:
            flops, values = zip(*points, strict=True)
            tera = [value / TERA for value in flops]
            axes.plot(
                tera, values, color=one["colour"], linestyle=style(one), marker="o", markersize=3, label=one["title"]
            )
    axes.set(xlabel="training TFLOPs", ylabel="τ by decoding held-out prompts, T = 0", xlim=(0, None))
    tidy(axes, legend=False)
    label_ends(axes)
    return figure


def over_positions(drafters: Mapping[str, Mapping[str, Any]]):
    figure = figure_of(8, 4.5)
    axes = figure.add_subplot()
    for one in drafters.values():
        rates = conditional(one["seeds"], "greedy")
        axes.plot(range(1, len(rates) + 1), rates, color=one["colour"], linestyle=style(one), label=one["title"])
    axes.set(xlabel="draft", ylabel="accepted, given that all before were", ylim=(0, 1))
    tidy(axes, legend=False)
    label_ends(axes)
    return figure


def style(one: Mapping[str, Any]) -> str:
    return "--" if "common" in one["title"] else "-"
