"""Several drafters side by side, over the same prompts: their names, compare.json and its tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.evals import tables
from domino_jax.evals.report import FORMAT, print_tables, report_header
from domino_jax.evals.run_info import RunInfo
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.json_files import write_json

COMPARISON = "compare.json"
DRAFTER_SECTIONS = ("drafter", "block_size", "round_widths", "verify_width", "modes", "identical_outputs")
DRAFTER_SECTIONS += ("tasks", "average")


def drafter_names(paths: Sequence[str], flag: str) -> list[str]:
    """A short name for each folder of a drafter or a run: its last part, with those above where two have the same one.
    DominoError where `flag`, which gives the paths, names a folder twice."""
    folders = [Path(path).expanduser().resolve() for path in paths]
    different = {folder.parent if folder.name == "export" else folder for folder in folders}  # a run is its export
    for depth in range(1, 20):
        names = ["-".join(folder.parts[1:][-depth:]) for folder in folders]
        if len(set(names)) == len(different) == len(paths):
            return names
    raise DominoError(f"{flag} names a folder twice: {', '.join(paths)}; name each once.")


def write_comparison(output: Path, info: RunInfo, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Writes compare.json and returns its content; a folder with it is finished."""
    comparison = {
        **report_header(FORMAT),
        **info.origin(),
        "simulated": info.simulated,
        "drafters": {name: {key: report[key] for key in DRAFTER_SECTIONS} for name, report in reports.items()},
    }
    write_json(output / COMPARISON, comparison)
    return comparison


def console_comparison(comparison: Mapping[str, Any]) -> None:
    """Prints the tables of a compare.json."""
    reports = list(comparison["drafters"].values())
    print_tables([tables.simulated(comparison), tables.paper_rows(reports), tables.comparison_rows(reports)])
