"""Several drafters side by side, over the same prompts."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import BASELINE, DRAFT, DecodeSettings, supported_modes
from domino_jax.evals import tables
from domino_jax.evals.lanes import Lane
from domino_jax.evals.measure import report_lanes
from domino_jax.evals.prompts import Prompt
from domino_jax.evals.report import FORMAT, print_table
from domino_jax.evals.run import run_lanes
from domino_jax.evals.run_files import RunFiles
from domino_jax.evals.run_info import RunInfo
from domino_jax.method.pair import Models
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.json_files import write_json
from domino_jax.weights.loading import LoadedTarget

COMPARISON = "compare.json"
DRAFTER_SECTIONS = (
    *("drafter", "block_size", "round_widths", "verify_width", "modes", "identical_outputs", "tasks", "average"),
)


@dataclasses.dataclass(frozen=True)
class ComparedDrafter:
    """path: for the report.  settings: with the limits of this drafter's block."""

    path: str
    models: Models
    settings: DecodeSettings


def drafter_names(paths: Sequence[str], flag: str) -> list[str]:
    """A short name for each folder: its last part, with the parts above where two would have the same name.

    flag: which gives the paths; a DominoError where it names a folder twice.
    """
    folders = [Path(path).expanduser().resolve() for path in paths]
    different = {folder.parent if folder.name == "export" else folder for folder in folders}  # a run is its export
    for depth in range(1, 20):
        names = ["-".join(folder.parts[1:][-depth:]) for folder in folders]
        if len(set(names)) == len(different) == len(paths):
            return names
    raise DominoError(f"{flag} names a folder twice: {', '.join(paths)}; name each drafter once.")


def compare_drafters(
    target: LoadedTarget,
    drafters: Mapping[str, ComparedDrafter],
    prompts: Sequence[Prompt],
    info: RunInfo,
    output: Path,
) -> dict[str, Any]:
    """Decodes prompts with every drafter; writes a report folder for each into `output`, and compare.json.

    A mode that needs a head is left out for drafters without one. Returns the content of compare.json.
    """
    settings = info.requested
    codec = TextCodec(target.tokenizer, settings.thinking)
    lanes = drafter_lanes(drafters, target.stop_ids)
    infos = {}
    for (name, one), weights in zip(drafters.items(), info.drafter["weights"], strict=True):
        drafter = {"drafter": {"path": one.path, "weights": weights}, "drafter_name": name}
        infos[name] = info.loaded(one.settings, target, prompts, one.models, **drafter)
    with RunFiles(output, info.origin()) as files:
        measured = run_lanes(lanes, prompts, codec, settings.batch_size, files, bool(info.simulated))
    reports = {}
    for name in drafters:
        chosen = [lane for lane in lanes if lane.drafter in (name, None)]
        reports[name] = report_lanes(chosen, measured, infos[name], prompts, output / name)
    return write_comparison(output, info, reports)


def drafter_lanes(drafters: Mapping[str, ComparedDrafter], stop_ids: Sequence[int]) -> list[Lane]:
    """One lane of plain decoding, which every speed-up is against, then the lanes of all drafters."""
    lanes = []
    for name, one in drafters.items():
        settings = one.settings
        generator = new_generator(one.models, settings, stop_ids)
        if BASELINE in settings.modes and not lanes:
            lanes.append(Lane(BASELINE, BASELINE, one.models, generator))
        supported = supported_modes(settings.modes, one.models.drafter.config)
        modes = [mode for mode in supported if mode != BASELINE]
        if not modes:
            raise DominoError(
                f"{one.path} is a drafter of head {one.models.drafter.config.head}, which has none of decode.modes"
                f" {', '.join(settings.modes)} but plain decoding; add {DRAFT}, or take the drafter out of"
                " decode.compare."
            )
        lanes += [Lane(f"{name}/{mode}", mode, one.models, generator, name) for mode in modes]
    return lanes


def write_comparison(output: Path, info: RunInfo, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Writes compare.json and returns its content; a folder with it is finished."""
    comparison = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **info.origin(),
        "simulated": info.simulated,
        "drafters": {name: {key: report[key] for key in DRAFTER_SECTIONS} for name, report in reports.items()},
    }
    write_json(output / COMPARISON, comparison)
    return comparison


def console_comparison(comparison: Mapping[str, Any]) -> None:
    """Prints the tables of a compare.json."""
    reports = list(comparison["drafters"].values())
    console = rich.console.Console()
    if comparison["simulated"]:
        console.print(tables.simulated(comparison), highlight=False, markup=False, soft_wrap=True)
    for rows in (tables.paper_rows(reports), tables.comparison_rows(reports)):
        print_table(rows, console)
