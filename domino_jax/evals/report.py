"""The report of a decoding run: report.json for programs, report.html for people, one table on the console.

docs/commands.md defines the figures of report.json. Two remarks on them:
  accept rate k  a last round that is cut by a stop id or by max_new_tokens counts the tokens that remain
  time_split     draft + head + verify + other = round; commit is the part of other that was timed too (round_times.py)
"""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table
import rich.text
from etils import epath

import domino_jax
from domino_jax.evals.bootstrap import LEVEL, RESAMPLES, SEED
from domino_jax.evals.mode_run import ModeRun, averages, figures_of
from domino_jax.evals.page import write_page
from domino_jax.evals.tables import notes_of, page_parts, rows_of, title
from domino_jax.models.kernels import REFUSED
from domino_jax.runtime.environment import usable_cores
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.json_files import read_json
from domino_jax.runtime.small_models import has_one_thread

REPORT = "report.json"

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers")
LONGEST = 1_000  # columns of a table; a narrower terminal breaks its lines
FORMAT = 4  # of report.json


def build_report(
    sections: Mapping[str, Any],
    runs: Mapping[str, ModeRun],
    tasks: Mapping[str, Mapping[str, ModeRun]],
    concurrency: Mapping[str, Any],
    times: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The report of one run; JSON values only.

    Args:
        sections: of RunInfo.as_json.  runs: by mode, the sums over all answers.  tasks: the same by task, if any.
        concurrency: figures by batch size and mode.  times: by mode, of Runner.time_rounds.
    """
    widths, untimed = sections["round_widths"], {"time_split": None, "break_even_tau": None}
    modes = {
        mode: {**figures, **(times[mode] if mode in times else untimed)}
        for mode, figures in figures_of(runs, widths).items()
    }
    by_task = {name: figures_of(task_runs, widths) for name, task_runs in tasks.items()}
    over = "answers, and for rates "
    over += "prompts" if sections["batch_size"] == 1 else "groups of prompts that ran together"
    return {
        **report_header(FORMAT),
        **sections,
        "modes": modes,
        "identical_outputs": {mode: figures["identical"] for mode, figures in modes.items() if figures["identical"]},
        "tasks": by_task,
        "average": averages(by_task),
        "concurrency": dict(concurrency),
        "interval_of": {"level": LEVEL, "resamples": RESAMPLES, "seed": SEED, "over": over},
    }


def report_header(format: int) -> dict[str, Any]:
    """The first fields of every report."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"format": format, "date": date, "versions": versions(), "device": device()}


def versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"domino_jax": domino_jax.__version__, "python": platform.python_version(), **packages}


def device() -> str:
    """Kind and number of the devices, and of the host's cores where those are the device."""
    devices, cores = jax.devices(), ""
    if devices[0].platform == "cpu":
        used, there = usable_cores(), os.cpu_count()
        of = f"{used} of " if used != there else ""
        cores = f", {of}{there} cores"
        if has_one_thread():
            cores += ", one thread"
    kernels = "".join(f"; {name} by XLA, because its kernel is refused: {why}" for name, why in REFUSED.items())
    return f"{len(devices)} × {devices[0].device_kind} ({devices[0].platform}{cores}){kernels}"


# ------------------------------------------------------------------------------------------------------ files


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Writes plots/, report.html and, last, report.json, each whole or not at all."""
    from domino_jax.evals.plots import report_pictures  # here: a decoding at the terminal needs no matplotlib

    write_page(folder, "report", report, report_pictures(report), **page_parts(report))


def read_report(folder: str | os.PathLike) -> dict[str, Any] | None:
    """The report of a finished run, None when there is none. DataError: it is damaged."""
    path = epath.Path(folder) / REPORT
    return read_json(path) if path.is_file() else None


def output_folder(path: str) -> Path:
    """The local folder of --output, created before anything is loaded; a DominoError for an address in a bucket."""
    if is_remote(path):
        raise DominoError(
            f"--output={path} is in a bucket, and this command writes to local folders; copy the folder when it is"
            " finished."
        )
    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def console_table(report: Mapping[str, Any], console: rich.console.Console | None = None) -> None:
    print_tables([title(report), rows_of(report, spread=False), *notes_of(report, spread=False)], console)


def print_tables(parts: Sequence[str | Sequence[Sequence[str]]], console: rich.console.Console | None = None) -> None:
    """Prints lines and tables (rows of cells, heading first), of which no cell is cut; empty tables are left out."""
    console = console or rich.console.Console()
    for part in filter(None, parts):
        if isinstance(part, str):
            console.print(part, highlight=False, markup=False, soft_wrap=True)
            continue
        table = rich.table.Table()
        heading, *body = [[rich.text.Text(cell) for cell in row] for row in part]
        for index, name in enumerate(heading):
            table.add_column(name, justify="right" if index else "left", no_wrap=True)
        for row in body:
            table.add_row(*row)
        needed = console.measure(table, options=console.options.update(width=LONGEST)).maximum
        # The console itself is widened: print(width=…) is at most the console's own.
        width, console.width = console.width, max(console.width, needed)
        console.print(table)
        console.width = width
