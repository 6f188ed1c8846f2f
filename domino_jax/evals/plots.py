"""The pictures of a report (tokens per round) and of a training run (curves over its steps)."""

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from matplotlib.figure import Figure

from domino_jax.decoding.evaluate import WIDTHS
from domino_jax.runtime.files import write_whole
from domino_jax.training.metrics import read_rows

SIZE, DOTS_PER_INCH = {"figsize": (7, 3.8), "layout": "constrained"}, 144  # inches

# One colour per mode in every picture, distinct also without red or green vision.
COLOURS = {"autoregressive": "#555555", "backbone": "#E69F00", "draft": "#0072B2", "domino": "#0072B2"}
OTHER = "#009E73"
FADING = ("#A6CEE3", "#74ADD1", "#4393C3", "#0072B2", "#08306B")  # narrow rounds to wide ones
LOSSES = {"base_loss": ("base", COLOURS["backbone"]), "final_loss": ("final", COLOURS["domino"])}
LOSSES |= {"selector_loss": ("selector", COLOURS["draft"]), "loss": ("whole", COLOURS["autoregressive"])}
TAUS = {"eval_tau": ("pooled", COLOURS["domino"]), "eval_tau_per_prompt": ("mean of prompts", OTHER)}
TAUS |= {"eval_tau_backbone": ("backbone alone", COLOURS["backbone"])}
BY_WIDTH = {f"eval_tau_{drafts}": (f"{drafts} drafts", colour) for drafts, colour in zip(WIDTHS, FADING, strict=True)}
# {picture: (title, axis, {key of metrics.jsonl: (label, colour)})}
CURVES = {
    "losses.png": ("Loss on training rows", "nats per token", LOSSES),
    "tau.png": ("τ of held-out prompts", "tokens per round", TAUS),
    "tau_by_width.png": ("τ of held-out prompts by the drafts of a round", "tokens per round", BY_WIDTH),
}


def report_pictures(report: Mapping[str, Any]) -> dict[str, Figure]:
    """The picture of the tokens emitted per round; none when no mode drafts."""
    modes = {mode: figures for mode, figures in report["modes"].items() if figures["accept_histogram"]}
    return {"accept_lengths.png": _histogram(modes)} if modes else {}


def _histogram(modes: Mapping[str, Mapping[str, Any]]) -> Figure:
    figure = Figure(**SIZE)
    axes = figure.add_subplot()
    each = 0.8 / len(modes)
    for index, (mode, figures) in enumerate(modes.items()):
        lengths = [int(length) for length in figures["accept_histogram"]]
        shares = [100 * count / figures["rounds"] for count in figures["accept_histogram"].values()]
        places = [length + (index - (len(modes) - 1) / 2) * each for length in lengths]
        label = f"{mode}: τ {figures['tau_pooled']:.2f}, {figures['rounds']:,} rounds"
        axes.bar(places, shares, width=each * 0.92, color=COLOURS.get(mode, OTHER), label=label)
    axes.set_xticks(range(1, max(len(figures["accept_histogram"]) for figures in modes.values()) + 1))
    labels = {"xlabel": "tokens emitted (accepted drafts + 1)", "ylabel": "share of rounds, %"}
    axes.set(title="Tokens emitted per round", **labels)
    tidy(axes)
    return figure


def plot_run(workdir: str | os.PathLike) -> list[str]:
    """Draws what <workdir>/metrics.jsonl holds into <workdir>/plots; returns the file names.

    A picture without data is not drawn.
    """
    rows = read_rows(epath.Path(workdir) / "metrics.jsonl")
    pictures = {}
    for name, (title, axis, curves) in CURVES.items():
        points = {key: [(row["step"], row[key]) for row in rows if row.get(key) is not None] for key in curves}
        if any(points.values()):
            lines = {curves[key][0]: points[key] for key in curves if points[key]}
            pictures[name] = draw_lines(lines, dict(curves.values()), title=title, xlabel="step", ylabel=axis)
    return save(epath.Path(workdir) / "plots", pictures) if pictures else []


def draw_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]], colours: Mapping[str, str] | None = None, **texts: str
) -> Figure:
    """A picture of lines, {label: points}. texts: title, xlabel and ylabel."""
    figure = Figure(**SIZE)
    axes = figure.add_subplot(**texts)
    for label, points in lines.items():
        columns = zip(*points, strict=True) if points else ((), ())
        axes.plot(*columns, color=colours.get(label) if colours else None, marker=".", label=label)
    tidy(axes)
    return figure


def tidy(axes) -> None:
    """Grid lines below the data, two spines, a legend without a box."""
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def save(folder: str | os.PathLike, pictures: Mapping[str, Figure]) -> list[str]:
    """Writes each picture to `folder`, which may be in a bucket, whole or not at all; returns the file names."""
    folder = epath.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
        write_whole(folder / name, picture.getvalue())
    return list(pictures)
