"""The one writer of tables: a whole table as CSV beside a page, a few of its columns as Markdown in the page.

A row is a mapping from column to value. Scripts hand over numbers; this module alone decides how they are printed.
"""

import csv
import datetime
import importlib.metadata
import os
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from domino_jax.runtime.environment import usable_cores
from domino_jax.runtime.files import write_whole

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DATA = "data"  # folder of the CSV files beside a page
NOTHING = "–"
CPU = pathlib.Path("/proc/cpuinfo")

Row = Mapping[str, Any]


def publish(page: pathlib.Path, name: str, rows: Sequence[Row], columns: Mapping[str, str], text: str) -> str:
    """Writes all columns to DATA/NAME.csv and a section with `text` and some columns into the page; returns the text.

    columns: column → heading. name: of the section's marks; spaces become underscores in the file's name.
    """
    file = page.parent / DATA / f"{name.replace(' ', '_')}.csv"
    write_csv(file, rows)
    link = f"[All columns](data/{file.name}) are in a data file."
    section = "\n\n".join([text.strip(), markdown(rows, columns), link])
    put_section(page, name, section)
    return section


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """A column that a row lacks stays empty there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: rounded(value) for key, value in row.items()} for row in rows)


def rounded(value: Any) -> Any:
    """A float with five significant digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def markdown(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Words are set to the left, numbers to the right."""
    body = [[cell(row.get(key)) for key in columns] for row in rows]
    texts = [all(isinstance(row.get(key), str) for row in rows) and key in rows[0] for key in columns]
    marks = ["---" if text else "---:" for text in texts]
    return "\n".join(f"| {' | '.join(line)} |" for line in (list(columns.values()), marks, *body))


def cell(value: Any) -> str:
    """Two digits after the point below 100, none above; None is a dash."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def put_section(path: pathlib.Path, name: str, text: str) -> None:
    """Writes `text` between the marks `name` of a Markdown file; where there are none, at its end with new ones."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    if begin not in page:
        page += f"\n{begin}\n{end}\n"
    before, rest = page.split(begin)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{before}{begin}\n{text.strip()}\n{end}{rest.split(end)[1]}")


# ------------------------------------------------------------------------------------------------- statistics


def with_spread(values: Sequence[float]) -> str:
    """The mean of the seeds ± half their range; one seed is a number alone."""
    around = f" ± {(max(values) - min(values)) / 2:.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{around}"


# -------------------------------------------------------------------------------------------------- conditions


def cpu_name() -> str:
    lines = CPU.read_text().splitlines() if CPU.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def conditions(packages: Iterable[str] = ("jax",)) -> str:
    """One sentence: processor, cores, load, versions of the packages, date. Call it after the measurement."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    load = os.getloadavg()[1]  # the mean of five minutes
    cores = f"{usable_cores()} core{'' if usable_cores() == 1 else 's'}"
    return f"{cpu_name()}, {cores}, load average {load:.1f} while it ran; {versions}; {datetime.date.today()}."
