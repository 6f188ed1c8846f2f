"""The sections of docs/beyond.md and the pictures of benchmarks/studies/beyond.py, from its recorded figures."""

from collections.abc import Mapping, Sequence
from math import isnan, nan
from statistics import fmean, median
from typing import Any

from benchmarks.document import changes_of, say_changes, say_seeds, table_lines
from domino_jax.evals.plots import label_ends
from domino_jax.method.settings import DRAFT, TREE
from domino_jax.runtime.figures import figure_of, tidy

NOTHING = "–"
KILO = 1e3
HEAD_TITLES = {"domino": "Domino", "markov": "Markov, vanilla", "dflash2": "DFlash2"}
KINDS = {
    "nested": ("one training with nested ranks", "#0072B2"),
    "alone": ("trained at that rank alone", "#D55E00"),
    "cut": ("rank 64 trained alone, then cut", "#555555"),
}
TRANSFERS = {
    "scratch": ("from scratch", "#D55E00"),
    "tables": ("with the first target's tables", "#0072B2"),
    "tables_frozen": ("with these tables, frozen", "#009E73"),
    "alone_scratch": ("head alone, from scratch", "#E69F00"),
    "alone_tables": ("head alone, with the tables", "#56B4E9"),
    "untrained": ("head alone, the tables untrained", "#000000"),
    "backbone": ("no head", "#999999"),
}
KINDS_OF_CHAINS = ("greedy", "sampled")
# A round that costs at most this times Domino's is as dear. Two drafters with the same program differed by up to 7 %
# with one seed, and by 1 % in the median of three.
EQUAL_COST = 1.02

Figures = Sequence[Mapping[str, Any]]


# ------------------------------------------------------------------------------------------------- several ranks


def multiscale_section(recorded: Mapping[str, Any], image: str) -> str:
    """recorded: of beyond.multiscale, with the keys that beyond.main adds."""
    title = HEAD_TITLES[recorded["head"]]
    heading = ["rank", *(f"τ, {words}" for words, _ in KINDS.values()), "head, k parameters", "head, kB per draft"]
    heading += ["head, ms", "round, ms", "round ÷ step", "tokens/s"]
    timings = recorded["timings"]
    body = []
    for rank, row in recorded["rows"].items():
        body.append(
            [
                str(rank),
                *(say(row[kind]) for kind in KINDS),
                *(f"{row['head'][key] / KILO:,.1f}" for key in ("parameters", "bytes")),
                *(f"{figure(timings, str(rank)):.2f}" for figure in (head_time, round_time, round_cost)),
                f"{speed(timings, str(rank), 'greedy'):,.0f}",
            ]
        )
    findings = []
    for rank, row in recorded["rows"].items():
        alone, cut = (say_changes(changes(row["nested"], row[kind])) for kind in ("alone", "cut"))
        whole = int(rank) == recorded["rank"]  # the training at that rank alone is then the one that is cut
        more = "" if whole else f", and {cut} that of the cut of a training at rank {recorded['rank']}"
        findings.append(
            f"At rank {rank} τ of the nested training is {alone} that of the training at that rank alone{more}."
        )
    text = (
        "Each training has the same steps, so the nested one trains all ranks for the price of one. τ is of chains at "
        "temperature 0 with the head cut to the rank (`decode.head_rank`). Times are of the heads trained alone, first "
        "seed, which have the shapes of the cut ones; they alternated in one process, one request at a time. Tokens/s "
        f"are of {timings['prompts']} prompts. {timings['conditions']}"
    )
    return page(recorded, f"Several ranks from one training: {title}", text, heading, body, findings, image)


def multiscale_picture(recorded: Mapping[str, Any]):
    figure = figure_of(7, 4)
    axes = figure.add_subplot()
    for kind, (words, colour) in KINDS.items():
        points = [(int(rank), mean(row[kind])) for rank, row in recorded["rows"].items()]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=words)
    axes.set(xlabel="rank of the head", ylabel="τ, T = 0")
    tidy(axes)
    return figure


# ------------------------------------------------------------------------------------------------- two targets


def transfer_section(recorded: Mapping[str, Any], image: str) -> str:
    curves = {name: mean_curve(curves) for name, curves in recorded["curves"].items()}
    steps = [step for step, _ in curves["scratch"]]

    def change_at(place: int, *names: str) -> str:
        taus = ([points[place][1] for points in recorded["curves"][name]] for name in names)
        return say_changes(changes_of(*taus))

    heading = ["τ after steps", *map(str, steps), "steps to the last τ from scratch"]
    goals = {"alone_tables": "alone_scratch", "alone_scratch": "alone_scratch", "untrained": "alone_scratch"}
    body = []
    for name, (words, _) in TRANSFERS.items():
        at = dict(curves[name])
        goal = curves[goals[name] if name in goals else "scratch"][-1][1]
        cells = [f"{at[step]:.2f}" if step in at else NOTHING for step in steps]
        if name == "untrained":
            cells[0] = f"{curves[name][0][1]:.2f}"  # nothing changes after its one step
        reached = steps_to(curves[name], goal)
        body.append([words, *cells, NOTHING if reached is None else f"{reached:.0f}"])
    pairs = (("tables", "scratch"), ("tables_frozen", "scratch"), ("alone_tables", "alone_scratch"))
    findings = [
        f"{TRANSFERS[one][0]}: τ is {change_at(place, one, other)} that {TRANSFERS[other][0]} after {steps[place]} "
        "steps."
        for one, other in pairs
        for place in (0, -1)
    ]
    text = (
        f"The head is the vanilla Markov head, whose tables know tokens alone, trained on the tiny target (24 layers, "
        f"128 wide). The second target has {recorded['layers']} layers, {recorded['width']} wide, the same tokenizer "
        f"and the same corpus, and was trained for {recorded['target_minutes']:g} minutes. Its drafters learn from its "
        'own answers. "Head alone" trains it on a frozen backbone that was trained without a head. The last column '
        "is where the line crosses the last τ of the training from scratch, of the head alone where it is alone."
    )
    return page(recorded, "One head for two targets", text, heading, body, findings, image)


def mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, float]]:
    """(step, τ) of several seeds → their mean at each step."""
    return [(int(points[0][0]), fmean(point[1] for point in points)) for points in zip(*curves, strict=True)]


def steps_to(curve: Sequence[tuple[int, float]], goal: float) -> float | None:
    """Where the line through the points first reaches `goal`; None if it never does."""
    before = None
    for step, value in curve:
        if value >= goal:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (goal - before[1]) / (value - before[1])
        before = (step, value)
    return None


def transfer_picture(recorded: Mapping[str, Any]):
    figure = figure_of(8, 4.5)
    axes = figure.add_subplot()
    last = max(step for curves in recorded["curves"].values() for step, _ in curves[0])
    for name, (words, colour) in TRANSFERS.items():
        points, style = mean_curve(recorded["curves"][name]), {"marker": "o", "markersize": 3}
        if len(points) == 1:  # it does not change
            points, style = [(0, points[0][1]), (last, points[0][1])], {"linestyle": ":"}
        axes.plot(*zip(*points, strict=True), color=colour, label=words, **style)
    axes.set(xlabel="steps on the second target", ylabel="τ by decoding held-out prompts, T = 0", xlim=(0, None))
    tidy(axes, legend=False)
    label_ends(axes)
    return figure


# ------------------------------------------------------------------------------------------------ combinations


def best_section(recorded: Mapping[str, Any], image: str) -> str:
    heading = ["drafter", "changes", "τ, T = 0", "τ, T = 1", "τ of a tree, T = 0", "τ of a tree, T = 1"]
    heading += ["head, ms", "round ÷ Domino's", "round ÷ step", "tokens/s, T = 0", "tokens/s, T = 1", "tokens/s, tree"]
    timings, body = recorded["timings"], []
    baseline, *others = recorded["rows"]
    for name, row in recorded["rows"].items():
        changed = ", ".join(f"{key} {value}" for key, value in sorted(row["changes"].items())) or "none"
        trees = [speed(one, name, "greedy", TREE) for one in timings] if row["trees"] else []
        body.append(
            [
                name,
                changed,
                *(say(row[kind]) for kind in ("greedy", "sampled", "trees", "sampled_trees")),
                f"{median([head_time(one, name) for one in timings]):.2f}",
                f"{cost_against(name, baseline, timings):.2f}",
                f"{median([round_cost(one, name) for one in timings]):.2f}",
                *(f"{median([speed(one, name, kind) for one in timings]):,.0f}" for kind in KINDS_OF_CHAINS),
                f"{median(trees):,.0f}" if trees else NOTHING,
            ]
        )
    plain = [f"{one['plain']['greedy']:,.0f}" for one in timings]
    findings = [verdict(name, baseline, recorded["rows"], timings) for name in others]
    text = (
        f"Blocks of {recorded['width']} slots, {recorded['width'] - 1} drafts a round, a tree of the recipe's nodes. "
        "Times are medians of the seeds; the drafters of a seed alternated in one process, one request at a time, with "
        f"{timings[0]['prompts']} prompts for tokens/s. Plain decoding ran at {', '.join(plain)} tokens/s beside the "
        "seeds, whose times therefore do not compare: the column of rounds and the sentences below the table take a "
        "quotient for each seed first. Round ÷ step is the τ above which a round pays. A round within "
        f"{EQUAL_COST - 1:.0%} of Domino's counts as equal in cost. {timings[0]['conditions']}"
    )
    return page(recorded, "The best drafter we can make", text, heading, body, findings, image, texts=2)


def verdict(name: str, baseline: str, rows: Mapping[str, Mapping[str, Figures]], timings: Figures) -> str:
    """Whether a drafter beats Domino at equal round cost: higher τ and more tokens per second at both temperatures with
    every seed, and a round that is not dearer."""
    taus = [changes(rows[name][kind], rows[baseline][kind]) for kind in KINDS_OF_CHAINS]
    speeds = [
        changes_of(*([speed(one, which, kind) for one in timings] for which in (name, baseline)))
        for kind in KINDS_OF_CHAINS
    ]
    cost = cost_against(name, baseline, timings)
    wins = cost <= EQUAL_COST and all(change > 0 for found in (*taus, *speeds) for change in found)
    said = [" and ".join(map(say_changes, found)) for found in (taus, speeds)]
    return (
        f"{name} {'beats' if wins else 'does not beat'} Domino at equal round cost: τ is {said[0]} Domino's at T = 0 "
        f"and 1, its round costs {cost:.2f} times Domino's, and its tokens per second are {said[1]} Domino's."
    )


def best_picture(recorded: Mapping[str, Any]):
    """τ over the cost of a round, a point a seed; above the diagonal a round pays."""
    figure = figure_of(7, 4.5)
    axes = figure.add_subplot()
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
    for place, (name, row) in enumerate(recorded["rows"].items()):
        costs = [round_cost(one, name) for one in recorded["timings"]]
        taus = [one["tau"] for one in row["greedy"]]
        axes.plot(costs, taus, color=colours[place % len(colours)], marker="o", linestyle="", label=name)
    axes.set(xlabel="round ÷ plain step", ylabel="τ, T = 0", xlim=(0, None), ylim=(0, None))
    axes.plot([0, axes.get_xlim()[1]], [0, axes.get_xlim()[1]], color="#bbbbbb", linewidth=1)
    tidy(axes)
    return figure


# ------------------------------------------------- figures of a timing (drafter_timings.py), by name of the drafter


def round_time(timings: Mapping[str, Any], name: str) -> float:
    """Milliseconds."""
    return timings["drafters"][name]["split"]["round"]


def head_time(timings: Mapping[str, Any], name: str) -> float:
    """Milliseconds of a draft."""
    return timings["drafters"][name]["split"]["head"]


def round_cost(timings: Mapping[str, Any], name: str) -> float:
    """In plain steps."""
    return timed(timings["drafters"][name]["break_even"])


def cost_against(name: str, baseline: str, timings: Figures) -> float:
    """The round in rounds of the baseline, the median of the seeds."""
    quotients = [timed(round_time(one, name)) / timed(round_time(one, baseline)) for one in timings]
    return nan if any(map(isnan, quotients)) else median(quotients)


def speed(timings: Mapping[str, Any], name: str, kind: str, mode: str = DRAFT) -> float:
    """Tokens per second."""
    return timed(timings["drafters"][name]["tokens_per_second"][kind][mode])


def timed(value: float | None) -> float:
    """NaN, which no comparison favours, for what was too fast to be timed."""
    return value or nan


# --------------------------------------------------------------------------------------------------- figures


def page(
    recorded: Mapping[str, Any],
    title: str,
    text: str,
    heading: Sequence[str],
    body: Sequence[Sequence[str]],
    findings: Sequence[str],
    image: str,
    texts: int = 1,
) -> str:
    """One section: title, command, what was done, table, picture, findings, equality, conditions."""
    seeds = len(recorded["seeds"])
    spread = f"means of {seeds} training seeds, ± half their range where it is given"
    if seeds == 1:
        spread = "one seed, so a difference of a few per cent decides nothing"
    parts = [
        f"## {title}",
        f"```\n{recorded['command']}\n```",
        f"{text} {recorded['steps']} steps; {spread}.",
        "\n".join(table_lines(heading, body, texts)),
        f"![{title}]({image})",
        "\n".join(f"- {sentence}" for sentence in [*findings, *equality(recorded)]),
        recorded["conditions"],
    ]
    return "\n\n".join(parts) + "\n"


def equality(recorded: Mapping[str, Any]) -> list[str]:
    """Whether the drafted texts are the target's, where they were decoded beside plain ones."""
    rows = recorded["rows"] if "rows" in recorded else {}
    whole = recorded["rank"] if "rank" in recorded else 0  # its cut is the training at that rank alone, counted once
    kinds = [
        figures
        for name, row in rows.items()
        for kind, figures in row.items()
        if isinstance(figures, list) and (str(name), kind) != (str(whole), "cut")
    ]
    counts = [[one[key] for figures in kinds for one in figures] for key in ("same", "of", "violations")]
    same, of, violations = map(sum, counts)
    if not of:
        return []
    return [
        f"Drafted against plain: {same:,} of {of:,} texts are equal; {violations} of the others differ by more than a "
        "near tie."
    ]


def mean(figures: Figures) -> float:
    """Of τ."""
    return fmean(one["tau"] for one in figures)


def say(figures: Figures) -> str:
    """Of τ the mean ± half the range."""
    return say_seeds([one["tau"] for one in figures]) if figures else NOTHING


def changes(ours: Figures, theirs: Figures) -> list[float]:
    """Of τ in per cent, seed by seed."""
    return changes_of(*([one["tau"] for one in figures] for figures in (ours, theirs)))


SECTIONS = {"multiscale": multiscale_section, "transfer": transfer_section, "best": best_section}
PICTURES = {"multiscale": multiscale_picture, "transfer": transfer_picture, "best": best_picture}
