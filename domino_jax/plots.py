"""The pictures of a report: how many tokens rounds emitted, and how far into a block drafts are accepted."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# One colour a mode in every picture; told apart also by people who see no red or no green.
COLOURS = {"backbone": "#E69F00", "domino": "#0072B2"}
OTHER = "#009E73"
MARKERS = {"backbone": "s", "domino": "o"}


def write_plots(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Writes the pictures of the modes that draft; returns their file names, none when no mode does."""
    modes = {mode: figures for mode, figures in report["modes"].items() if figures["accept_histogram"]}
    if not modes:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"accept_lengths.png": _histogram(modes), "acceptance_by_position.png": _rates(modes)}
    for name, figure in pictures.items():
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        figure.savefig(temporary, format="png", dpi=144)
        os.replace(temporary, folder / name)
    return list(pictures)


def _histogram(modes: Mapping[str, Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    each = 0.8 / len(modes)
    for index, (mode, figures) in enumerate(modes.items()):
        lengths = [int(length) for length in figures["accept_histogram"]]
        shares = [100 * count / figures["rounds"] for count in figures["accept_histogram"].values()]
        places = [length + (index - (len(modes) - 1) / 2) * each for length in lengths]
        label = f"{mode}: τ {figures['tau_pooled']:.2f}, {figures['rounds']:,} rounds"
        axes.bar(places, shares, width=each * 0.92, color=COLOURS.get(mode, OTHER), label=label)
    axes.set_xticks(lengths)
    axes.set(
        title="Tokens emitted per round", xlabel="tokens emitted (accepted drafts + 1)", ylabel="share of rounds, %"
    )
    _tidy(axes)
    return figure


def _rates(modes: Mapping[str, Mapping[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {
        "accept_rate_by_position": "Draft kept, of all rounds",
        "conditional_accept_rate_by_position": "Draft kept, of rounds that kept the one before",
    }
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for mode, figures in modes.items():
            rates = [None if rate is None else 100 * rate for rate in figures[key]]
            points = [(place, rate) for place, rate in enumerate(rates, 1) if rate is not None]
            axes.plot(
                *zip(*points, strict=True), color=COLOURS.get(mode, OTHER), marker=MARKERS.get(mode, "^"), label=mode
            )
        axes.set_xticks(range(1, len(rates) + 1))
        axes.set(title=title, xlabel="draft position in the block", ylim=(0, 102))
        _tidy(axes)
    panels[0].set_ylabel("%")
    return figure


def _tidy(axes) -> None:
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
