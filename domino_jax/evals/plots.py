"""The pictures of a report (rounds and positions) and of a training run (curves over its steps)."""

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etils import epath
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from domino_jax.runtime.figures import figure_of, save, tidy
from domino_jax.training.metrics import read_rows

# One colour per mode in every picture, distinct also without red or green vision.
COLOURS = {"autoregressive": "#555555", "backbone": "#E69F00", "draft": "#0072B2", "domino": "#0072B2"}
OTHER = "#009E73"
MARKERS = {"autoregressive": "x", "backbone": "s", "draft": "o", "domino": "o"}


def look(mode: str) -> dict[str, str]:
    """Colour, marker and label of a mode's line."""
    return {"color": COLOURS.get(mode, OTHER), "marker": MARKERS.get(mode, "^"), "label": mode}


def write_plots(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Writes the pictures of a decoding report; returns their file names, none when no mode drafts.

    accept_lengths.png: tokens emitted per round.  acceptance_by_position.png: plain and conditional.
    """
    modes = {mode: figures for mode, figures in report["modes"].items() if figures["accept_histogram"]}
    if not modes:
        return []
    pictures = {"accept_lengths.png": _histogram(modes), "acceptance_by_position.png": _rates(modes)}
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


# ------------------------------------------------------------------------------------------- a training run


def plot_run(workdir: str | os.PathLike) -> list[str]:
    """Draws what <workdir>/metrics.jsonl holds into <workdir>/plots; returns the file names.

    losses.png: base and final (or the selector's) loss, and the teacher-forced accept length, over the steps.  tau.png:
    τ by decoding over the steps, pooled, per prompt and of the backbone alone. A picture without data is not drawn.
    """
    rows = read_rows(epath.Path(workdir) / "metrics.jsonl")
    trained = [row for row in rows if any(row.get(key) is not None for key in ("loss", "base_loss", "final_loss"))]
    evaluated = [row for row in rows if row.get("eval_tau") is not None]
    pictures = {}
    if len(trained) > 1:
        pictures["losses.png"] = _losses(trained)
    if evaluated:
        pictures["tau.png"] = _taus(evaluated)
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
        tidy(axes, legend=len(kinds) > 1)
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


def _taus(rows: Sequence[Mapping[str, Any]]) -> Figure:
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
    tidy(axes)
    return figure
