"""The pictures of a report (rounds and positions) and of a training run (curves over its steps)."""

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from domino_jax.method.settings import BASELINE
from domino_jax.runtime.figures import figure_of, save, tidy
from domino_jax.training.metrics import read_rows

# One colour per mode in every picture, distinct also without red or green vision.
COLOURS = {"autoregressive": "#555555", "backbone": "#E69F00", "draft": "#0072B2", "domino": "#0072B2"}
OTHER = "#009E73"
MARKERS = {"autoregressive": "x", "backbone": "s", "draft": "o", "domino": "o"}
# The parts of a round's bar, in its order.
PARTS = {
    "draft": "#E69F00",
    "head": "#D55E00",
    "verify": "#0072B2",
    "commit": "#009E73",
    "loop and rest": "#BBBBBB",
}


def look(mode: str) -> dict[str, str]:
    """Colour, marker and label of a mode's line."""
    return {"color": COLOURS.get(mode, OTHER), "marker": MARKERS.get(mode, "^"), "label": mode}


def write_plots(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Writes the pictures of a decoding report; returns their file names, none when no mode drafts.

    accept_lengths.png: tokens emitted per round.  round_times.png: a round's parts.
    acceptance_by_position.png: plain and conditional.  speedup_by_task.png: with 95 % intervals, from two tasks on.
    throughput.png: tokens/s over the rows decoded together, where that was measured.
    """
    modes = {mode: figures for mode, figures in report["modes"].items() if figures["accept_histogram"]}
    if not modes:
        return []
    pictures = {"accept_lengths.png": _histogram(modes)}
    split = {mode: figures["time_split"] for mode, figures in modes.items() if figures["time_split"]}
    split = {mode: parts for mode, parts in split.items() if parts["commit"] is not None}  # timed part by part
    if split:
        pictures["round_times.png"] = _round_times(split)
    pictures["acceptance_by_position.png"] = _rates(modes)
    if len(report["tasks"]) > 1 and BASELINE in report["modes"]:
        pictures["speedup_by_task.png"] = _speedups(report["tasks"], report["average"], list(modes))
    if len(report["concurrency"]) > 1:
        pictures["throughput.png"] = _throughput(report["concurrency"])
    if report["simulated"]:
        for figure in pictures.values():
            figure.suptitle(f"SIMULATED acceptance, τ forced to {report['simulated']:g}", color="#D55E00")
    return save(folder, pictures)


def _histogram(modes: Mapping[str, Mapping[str, Any]]) -> Figure:
    figure = figure_of(7, 3.8)
    axes = figure.add_subplot()
    each = 0.8 / len(modes)
    for index, (mode, figures) in enumerate(modes.items()):
        lengths = [int(length) for length in figures["accept_histogram"]]
        shares = [100 * count / figures["rounds"] for count in figures["accept_histogram"].values()]
        places = [length + (index - (len(modes) - 1) / 2) * each for length in lengths]
        label = f"{mode}: τ {figures['tau_pooled']:.2f}, {figures['rounds']:,} rounds"
        axes.bar(places, shares, width=each * 0.92, color=COLOURS.get(mode, OTHER), label=label)
    axes.set_xticks(range(1, max(len(figures["accept_histogram"]) for figures in modes.values()) + 1))
    axes.set(
        title="Tokens emitted per round", xlabel="tokens emitted (accepted drafts + 1)", ylabel="share of rounds, %"
    )
    tidy(axes)
    return figure


def _rates(modes: Mapping[str, Mapping[str, Any]]) -> Figure:
    figure = figure_of(9, 3.8)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {
        "accept_rate_by_position": "Draft kept, of all rounds",
        "conditional_accept_rate_by_position": "Draft kept, of rounds that kept the one before",
    }
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for mode, figures in modes.items():
            rates = [None if rate is None else 100 * rate for rate in figures[key]]
            points = [(place, rate) for place, rate in enumerate(rates, 1) if rate is not None]
            axes.plot(*zip(*points, strict=True), **look(mode))
        axes.set_xticks(range(1, max(len(figures[key]) for figures in modes.values()) + 1))
        axes.set(title=title, xlabel="draft position in the block", ylim=(0, 102))
        tidy(axes)
    panels[0].set_ylabel("%")
    return figure


def _round_times(split: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bars of the parts, one below the other, with a single-token step of the target alone as the measure."""
    figure = figure_of(7, 1.7 + 0.55 * len(split))
    axes = figure.add_subplot()
    for row, mode in enumerate(split):
        left = 0.0
        rest = split[mode]["other"] - split[mode]["commit"]
        values = {**split[mode], "loop and rest": max(0.0, rest)}
        for part, colour in PARTS.items():
            axes.barh(row, values[part], left=left, color=colour, height=0.6, label="_" if row else part)
            left += values[part]
    axes.set_yticks(range(len(split)), list(split))
    axes.invert_yaxis()
    axes.axvline(split[mode]["step"], color="black", linestyle="--", linewidth=1, label="one plain step")
    axes.set(title="One round and its parts", xlabel="milliseconds")
    tidy(axes, legend=False, across="x")
    figure.legend(frameon=False, ncols=6, loc="outside lower center", handlelength=1, columnspacing=1)
    return figure


def _speedups(tasks: Mapping[str, Any], average: Mapping[str, Any], modes: Sequence[str]) -> Figure:
    figure = figure_of(max(5, 1.6 + 1.05 * (len(tasks) + 1)), 4)
    axes = figure.add_subplot()
    each = 0.8 / len(modes)
    names = [*tasks, "average"]
    for index, mode in enumerate(modes):
        for place, name in enumerate(names):
            figures = tasks[name][mode] if name in tasks else average[mode]
            if figures["speedup"] is None:
                continue
            at = place + (index - (len(modes) - 1) / 2) * each
            label = mode if place == 0 else "_"
            axes.bar(at, figures["speedup"], width=each * 0.92, color=COLOURS.get(mode, OTHER), label=label)
            if name in tasks and (bounds := figures["intervals"]["speedup"]):
                axes.plot([at, at], bounds, color="black", linewidth=1)
    axes.axhline(1, color="black", linewidth=1)
    axes.axvline(len(tasks) - 0.5, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(names)), names)
    axes.set(title="Speed-up against the target alone", ylabel="×")
    tidy(axes, legend=False)
    figure.legend(frameon=False, ncols=len(modes), loc="outside lower center")
    return figure


def _throughput(concurrency: Mapping[str, Any]) -> Figure:
    figure = figure_of(9, 3.8)
    total, gain = figure.subplots(1, 2)
    sizes = [int(size) for size in concurrency]
    for mode in next(iter(concurrency.values()))["modes"]:
        levels = [level["modes"][mode] for level in concurrency.values()]
        total.plot(sizes, [figures["tokens_per_second"] for figures in levels], **look(mode))
        if mode != BASELINE and all(figures["speedup"] is not None for figures in levels):
            gain.plot(sizes, [figures["speedup"] for figures in levels], **look(mode))
    gain.axhline(1, color="black", linewidth=1)
    total.set(title="Throughput", ylabel="tokens/s", ylim=(0, None))
    gain.set(title="Speed-up at the same size", ylabel="×", ylim=(0, None))
    for axes in (total, gain):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("rows decoded together")
    tidy(total)
    tidy(gain, legend=False)
    return figure


# ------------------------------------------------------------------------------------------- a training run


def plot_run(workdir: str | os.PathLike) -> list[str]:
    """Draws what <workdir>/metrics.jsonl holds into <workdir>/plots; returns the file names.

    losses.png: base and final (or the selector's) loss, and the teacher-forced accept length, over the steps.  tau.png:
    τ by decoding over the steps and over hours, pooled, per prompt and of the backbone alone.  accept_by_position.png:
    for each evaluation, the share of rounds that kept the draft at each position. A picture without data is not drawn.
    """
    rows = read_rows(epath.Path(workdir) / "metrics.jsonl")
    trained = [row for row in rows if any(row.get(key) is not None for key in ("loss", "base_loss", "final_loss"))]
    evaluated = [row for row in rows if row.get("eval_tau") is not None]
    positions = [row for row in evaluated if row.get("eval_accept_by_position")]
    pictures = {}
    if len(trained) > 1:
        pictures["losses.png"] = _losses(trained)
    if evaluated:
        pictures["tau.png"] = _taus(evaluated, rows)
    if positions:
        pictures["accept_by_position.png"] = _positions_over_time(positions)
    return save(epath.Path(workdir) / "plots", pictures) if pictures else []


def _losses(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = figure_of(10, 3.8)
    loss, accepted = figure.subplots(1, 2)
    blocks = any("base_loss" in row for row in rows)
    kinds = {"backbone": ("base_loss", "base_accept_len") if blocks else ("loss", "accept_len")}
    if any("selector_loss" in row for row in rows):
        kinds["draft"] = ("selector_loss", "serving_accept_len")
    # One head, one curve: without a head the final loss is the base loss.
    elif any(row.get("base_loss") != row.get("final_loss") for row in rows):
        kinds["domino"] = ("final_loss", "accept_len")
    names = {"backbone": "_" if len(kinds) == 1 else "base", "domino": "final", "draft": "selector"}
    for mode, keys in kinds.items():
        for axes, key in zip((loss, accepted), keys, strict=True):
            curve(axes, points(rows, key), COLOURS[mode], names[mode])
    loss.set(title="Loss on training rows", xlabel="step", ylabel="cross-entropy, nats per token")
    # The first steps are far above the rest and would flatten it.
    loss.set_yscale("log")
    loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    loss.yaxis.set_major_formatter("{x:g}")
    loss.yaxis.set_minor_locator(NullLocator())
    accepted.set(title="Teacher-forced accept length", xlabel="step", ylabel="tokens per block")
    for axes in (loss, accepted):
        tidy(axes, legend=False)
        label_ends(axes)
    return figure


def points(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that have a value."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def curve(axes, pairs: Sequence[tuple[int, float]], colour: str, label: str) -> None:
    """A line through noisy points: their running mean over a twentieth of them, and the points themselves, pale."""
    if not pairs:
        return
    steps, values = zip(*pairs, strict=True)
    half = len(values) // 40
    means = [statistics.fmean(values[max(index - half, 0) : index + half + 1]) for index in range(len(values))]
    if half:
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, means, color=colour, linewidth=1.8, label=label)


def label_ends(axes, gap: float = 0.065, right: float | None = None) -> None:
    """Writes each line's label after its end, in its colour, without overlaps.

    Args:
        gap: the height of a line of text, as a share of these axes.
        right: where all labels begin, as a share of the width; None: each after its own line.
    """
    axes.autoscale_view()  # else the limits are those of an empty picture
    to_shares = axes.transData + axes.transAxes.inverted()  # data → shares of the axes' width and height
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    ends = sorted(((*to_shares.transform(line.get_xydata()[-1]), line) for line in lines), key=lambda end: end[1])
    for (end, _, line), height in zip(ends, spread([height for _, height, _ in ends], gap), strict=True):
        place = end + 0.02 if right is None else right
        axes.text(place, height, line.get_label(), transform=axes.transAxes, color=line.get_color(), va="center")


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved apart by at least `gap`, upwards from the axes' bottom (0) and back down from their top
    (1): a value of 0 on a logarithmic axis is infinitely far below."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap if moved else 0.0))
    most = 1.0
    for place in reversed(range(len(moved))):
        moved[place] = min(moved[place], most)
        most = moved[place] - gap
    return moved


def _taus(rows: Sequence[Mapping[str, Any]], logged: Sequence[Mapping[str, Any]]) -> Figure:
    figure = figure_of(7, 3.8)
    axes = figure.add_subplot()
    lines = {
        "eval_tau": ("pooled", "domino", "-"),
        "eval_tau_per_prompt": ("mean of prompts", "domino", "--"),
        "eval_tau_backbone": ("backbone alone", "backbone", "-"),
    }
    if all(row.get("eval_tau") == row.get("eval_tau_backbone") for row in rows):
        del lines["eval_tau_backbone"]  # a drafter without a head is its backbone
    for key, (label, mode, style) in lines.items():
        pairs = points(rows, key)
        if pairs:
            text = f"{pairs[-1][1]:.2f} {label}"
            axes.plot(*zip(*pairs, strict=True), style, **{**look(mode), "label": text}, markersize=4)
    axes.set(title="τ by decoding held-out prompts", xlabel="step", ylabel="tokens per round", xlim=(0, None))
    axes.set_ylim(bottom=1)  # a round emits at least one token
    tidy(axes, legend=False)
    label_ends(axes)
    _add_hours(axes, logged)
    return figure


def _add_hours(axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """A second axis, above: the hours after which the run reached a step; of a core where it ran on a CPU."""
    key, label = ("seconds", "hours")
    if any("cpu_seconds" in row for row in rows):
        key, label = "cpu_seconds", "hours of a core, evaluations included"
    steps, seconds = (np.asarray(values, float) for values in zip(*[(0, 0.0), *points(rows, key)], strict=True))
    hours = np.maximum.accumulate(seconds) / 3_600
    if hours[-1] > 0:
        # The picture ends a little after the last step, so the axis goes on at the run's own pace.
        steps, hours = np.append(steps, 2 * steps[-1]), np.append(hours, 2 * hours[-1])
        ahead, back = (lambda step: np.interp(step, steps, hours)), (lambda hour: np.interp(hour, hours, steps))
        axes.secondary_xaxis("top", functions=(ahead, back)).set_xlabel(label)


def _positions_over_time(rows: Sequence[Mapping[str, Any]]) -> Figure:
    figure = figure_of(7, 3.8)
    axes = figure.add_subplot()
    steps = [row["step"] for row in rows]
    colours = ScalarMappable(Normalize(0, max(steps)), "viridis_r")
    for row in rows:
        rates = [100 * rate for rate in row["eval_accept_by_position"]]
        last = row["step"] == steps[-1]
        axes.plot(
            range(1, len(rates) + 1), rates, color=colours.to_rgba(row["step"]), marker="o", markersize=3 + 2 * last
        )
    axes.set_xticks(range(1, len(rates) + 1))
    axes.set(
        title="Drafts kept, by position, over the run",
        xlabel="draft position in the block",
        ylabel="share of rounds that kept it, %",
        ylim=(0, 102),
    )
    few = steps[:: -max(1, -(-len(steps) // 8))]  # at most eight, the last among them
    figure.colorbar(colours, ax=axes, label="step", ticks=few)
    tidy(axes, legend=False)
    return figure
