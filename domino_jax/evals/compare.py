"""Several drafters in one run: all of them and one plain yardstick take turns on the same prompts, then one table."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import BASELINE, DecodeSettings, supported_modes
from domino_jax.drafters.pair import Models
from domino_jax.evals.describe import describe, run_identity, timings
from domino_jax.evals.lanes import Lane
from domino_jax.evals.report import build_report, write_json, write_report
from domino_jax.evals.run import Speech, check_rows, run_lanes
from domino_jax.evals.run_files import RunFiles
from domino_jax.evals.tables import comparison_lines, latex_table, markdown_table, paper_table
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import write_whole
from domino_jax.weights.loading import LoadedTarget

COMPARISON = "compare.json"
PAGE, LATEX = "compare.md", "compare.tex"
KEPT = ("drafter", "block_size", "round_widths", "verify_width", "modes", "identical_outputs", "tasks", "average")


def drafter_names(paths: Sequence[str]) -> list[str]:
    """A short name for each folder: its own, with the one above it where two are called alike."""
    for depth in range(1, 20):
        names = ["-".join(Path(path).expanduser().resolve().parts[1:][-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise DominoError(f"config.decode.compare names a folder twice: {', '.join(paths)}; name each drafter once.")


def compare_drafters(
    target: LoadedTarget,
    drafters: Mapping[str, tuple[str, Models]],
    rows: Sequence[Mapping[str, Any]],
    settings: DecodeSettings,
    output: Path,
    named: Mapping[str, Any],
) -> dict[str, Any]:
    """Decodes rows with every drafter; writes a report folder for each below `output`, and compare.{md,tex,json}.

    Modes that a drafter has no head for are left out for it. Returns what compare.json holds.

    Args:
        drafters: by name, the folder and the models.
        named: as for decode.decode_rows.
    """
    speech = Speech(target.tokenizer, settings.thinking)
    lanes = drafter_lanes(drafters, target.stop_ids, settings)
    check_rows(lanes, rows, speech)
    run = run_identity(named, rows, settings, *(models for _, models in drafters.values()))
    with RunFiles(output, run) as files:
        simulated = settings.simulate_tau > 0
        measured = run_lanes(lanes, rows, speech, settings.batch_size, files, simulated)
    reports = {}
    for name, (path, models) in drafters.items():
        own = {lane.mode: lane for lane in lanes if lane.drafter in (name, None)}
        facts = describe(models, target, rows, settings, {**named, "drafter": {"path": path, "name": name}})
        reports[name] = build_report(
            {mode: measured.runs[lane.name] for mode, lane in own.items()},
            tasks={
                task: {mode: runs[lane.name] for mode, lane in own.items()} for task, runs in measured.tasks.items()
            },
            batch_size=settings.batch_size,
            facts=facts,
            sittings=files.sittings,
            **timings(own, rows, speech),
        )
        write_report(output / name, reports[name])
    return write_comparison(output, named, reports)


def drafter_lanes(
    drafters: Mapping[str, tuple[str, Models]], stop_ids: Sequence[int], settings: DecodeSettings
) -> list[Lane]:
    """The lanes of all drafters behind the one of plain decoding, which every speed-up is against."""
    lanes = []
    for name, (path, models) in drafters.items():
        generator = new_generator(models, settings.generator(stop_ids))
        if BASELINE in settings.modes and not lanes:
            lanes.append(Lane(BASELINE, BASELINE, models, generator))
        own_modes = supported_modes(settings.modes, models.drafter.config.has_head)
        modes = [mode for mode in own_modes if mode != BASELINE]
        if not modes:
            raise DominoError(
                f"{path} is a plain DFlash drafter without a Domino head, and decode.modes"
                f" {', '.join(settings.modes)} has no backbone; add it, or take the drafter out of decode.compare."
            )
        lanes += [Lane(f"{name}/{mode}", mode, models, generator, name) for mode in modes]
    return lanes


def write_comparison(
    output: Path, named: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """compare.md, compare.tex and, last, compare.json, whose being there says that the run is finished."""
    table = paper_table(list(reports.values()))
    page = ["# Drafters side by side", "", *markdown_table(table).splitlines(), ""]
    page += [*comparison_lines(reports), "", *(f"- [{name}]({name}/report.md)" for name in reports)]
    write_whole(output / PAGE, "\n".join(page) + "\n")
    write_whole(output / LATEX, latex_table(table))
    comparison = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **named,
        "simulated": next(iter(reports.values()))["simulated"],
        "drafters": {name: {key: report[key] for key in KEPT} for name, report in reports.items()},
    }
    write_json(output / COMPARISON, comparison)
    return comparison
