"""The look of every picture, and how pictures are written: one style for reports, training curves and benchmarks."""

import io
import os
from collections.abc import Mapping

from etils import epath
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from domino_jax.runtime.files import write_whole

DOTS_PER_INCH = 144


def figure_of(width: float, height: float) -> Figure:
    """An empty picture, sizes in inches; no window and no global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes, legend: bool = True, across: str = "y") -> None:
    """Grid lines across the values and below the data, two spines, a legend without a box."""
    axes.grid(axis=across, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
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
