"""Side by side: several drafters over the same prompts, and throughput by the number of rows decoded together."""

import dataclasses
import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import BASELINE, DecodeSettings, supported_modes
from domino_jax.drafters.pair import Models
from domino_jax.evals.examples import collect_examples
from domino_jax.evals.lanes import Lane, ModeRun
from domino_jax.evals.prompts import Prompt, TextCodec, check_prompts
from domino_jax.evals.report import build_report, figures_of, identical_outputs, ratio, write_json, write_report
from domino_jax.evals.run import Measured, decode_group, plan_groups, run_lanes, timings
from domino_jax.evals.run_files import RunFiles
from domino_jax.evals.run_info import RunInfo
from domino_jax.evals.tables import comparison_lines, latex_table, markdown_table, paper_table
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import write_whole
from domino_jax.runtime.progress import Progress
from domino_jax.weights.loading import LoadedTarget

COMPARISON = "compare.json"
PAGE, LATEX = "compare.md", "compare.tex"
DRAFTER_SECTIONS = (
    *("drafter", "block_size", "round_widths", "verify_width", "modes", "identical_outputs", "tasks", "average"),
)
LEVEL_FIGURES = (
    *("answers", "tokens", "seconds", "tokens_per_second", "prefill_seconds", "tau_pooled", "speedup", "intervals"),
)

# ------------------------------------------------------------------------------------------------- drafters


@dataclasses.dataclass(frozen=True)
class ComparedDrafter:
    """path: for the report.  settings: with the limits of this drafter's block."""

    path: str
    models: Models
    settings: DecodeSettings


def drafter_names(paths: Sequence[str]) -> list[str]:
    """A short name for each folder: its last part, with the parts above where two would have the same name."""
    for depth in range(1, 20):
        names = ["-".join(Path(path).expanduser().resolve().parts[1:][-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise DominoError(f"config.decode.compare names a folder twice: {', '.join(paths)}; name each drafter once.")


def compare_drafters(
    target: LoadedTarget,
    drafters: Mapping[str, ComparedDrafter],
    prompts: Sequence[Prompt],
    info: RunInfo,
    output: Path,
) -> dict[str, Any]:
    """Decodes prompts with every drafter; writes a report folder for each into `output`, and compare.{md,tex,json}.

    A mode that needs a head is left out for drafters without one. Returns the content of compare.json.
    """
    settings = info.requested
    codec = TextCodec(target.tokenizer, settings.thinking)
    lanes = drafter_lanes(drafters, target.stop_ids)
    check_prompts(list({id(lane.generator): lane.generator for lane in lanes}.values()), prompts, codec)
    infos = {
        name: info.loaded(one.settings, target, prompts, one.models.drafter.config, drafter=one.path, drafter_name=name)
        for name, one in drafters.items()
    }
    identity = dataclasses.replace(info, settings=settings).identity(prompts, [one.models for one in drafters.values()])
    with RunFiles(output, identity) as files:
        measured = run_lanes(lanes, prompts, codec, settings.batch_size, files, bool(info.simulated))
    reports = {}
    for name in drafters:
        chosen = {lane.mode: lane for lane in lanes if lane.drafter in (name, None)}

        def of(runs: Mapping[str, ModeRun], chosen=chosen) -> dict[str, ModeRun]:
            return {mode: runs[lane.name] for mode, lane in chosen.items()}

        reports[name] = build_report(
            of(measured.runs),
            infos[name],
            tasks={task: of(runs) for task, runs in measured.tasks.items()},
            sittings=files.sittings,
            **timings(chosen, prompts),
        )
        examples = collect_examples(list(chosen.values()), prompts, codec, output)
        write_report(output / name, reports[name], examples, codec)
    return write_comparison(output, info, reports)


def drafter_lanes(drafters: Mapping[str, ComparedDrafter], stop_ids: Sequence[int]) -> list[Lane]:
    """One lane of plain decoding, which every speed-up is against, then the lanes of all drafters."""
    lanes = []
    for name, one in drafters.items():
        settings = one.settings
        generator = new_generator(one.models, settings.generator(stop_ids))
        if BASELINE in settings.modes and not lanes:
            lanes.append(Lane(BASELINE, BASELINE, one.models, generator))
        supported = supported_modes(settings.modes, one.models.drafter.config.has_head)
        modes = [mode for mode in supported if mode != BASELINE]
        if not modes:
            raise DominoError(
                f"{one.path} is a plain DFlash drafter without a Domino head, and decode.modes"
                f" {', '.join(settings.modes)} has no backbone; add it, or take the drafter out of decode.compare."
            )
        lanes += [Lane(f"{name}/{mode}", mode, one.models, generator, name) for mode in modes]
    return lanes


def write_comparison(output: Path, info: RunInfo, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Writes compare.md, compare.tex and, last, compare.json; a folder with compare.json is finished."""
    table = paper_table(list(reports.values()))
    page = ["# Drafters side by side", "", *markdown_table(table).splitlines(), ""]
    page += [*comparison_lines(reports), "", *(f"- [{name}]({name}/report.md)" for name in reports)]
    write_whole(output / PAGE, "\n".join(page) + "\n")
    write_whole(output / LATEX, latex_table(table))
    comparison = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **info.origin(),
        "simulated": info.simulated,
        "drafters": {name: {key: report[key] for key in DRAFTER_SECTIONS} for name, report in reports.items()},
    }
    write_json(output / COMPARISON, comparison)
    return comparison


# ---------------------------------------------------------------------------------------------- batch sizes


def measure_concurrency(
    lanes_of: Callable[[int], Sequence[Lane]],
    prompts: Sequence[Prompt],
    codec: TextCodec,
    files: RunFiles,
    info: RunInfo,
) -> dict[str, dict[str, Any]]:
    """By batch size of `info`: {"modes": figures by mode, "identical_outputs": against the baseline of this size}.

    tokens_per_second is the loop's; output_tokens_per_second also counts the prefills and the first tokens, as the
    clients of a server would. First turns only. A size that `files` already holds is not measured again.

    Args:
        lanes_of: batch size → lanes.
    """
    first_turns = [dataclasses.replace(prompt, later_turns=(), task=None) for prompt in prompts]
    done = {str(record["concurrency"]): record["level"] for record in files.records if "concurrency" in record}
    sizes = info.settings.concurrency
    for size in sizes:
        if str(size) not in done:
            level = _level(lanes_of(size), size, first_turns, codec, info)
            files.append({"concurrency": size, "level": level}, [])
            done[str(size)] = level
    return {str(size): done[str(size)] for size in sizes}


def _level(
    lanes: Sequence[Lane], size: int, prompts: Sequence[Prompt], codec: TextCodec, info: RunInfo
) -> dict[str, Any]:
    measured = Measured.empty(lanes)
    with Progress(f"decode, {size} at a time", total=len(prompts)) as progress:
        for group in plan_groups(prompts, size):
            record, lines = decode_group(lanes, group, codec, bool(info.simulated))
            measured.add(lanes, record, lines)
            progress.advance(len(group.prompts))
    modes = {}
    for mode, figures in figures_of(measured.runs, info, size).items():
        seconds = figures["seconds"] + figures["prefill_seconds"]
        modes[mode] = {
            **{key: figures[key] for key in LEVEL_FIGURES},
            "output_tokens_per_second": ratio(figures["tokens"], seconds),
        }
    return {"modes": modes, "identical_outputs": identical_outputs(measured.runs)}
