"""A measured run: prompts in every mode of one drafter or several, throughput by batch size, the reports."""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.settings import BASELINE, DRAFT, supported_modes
from domino_jax.evals.lanes import Lane, ModeRun
from domino_jax.evals.report import build_report, write_report
from domino_jax.evals.run import Measured, run_lanes, time_rounds
from domino_jax.evals.run_files import RunFiles
from domino_jax.evals.run_info import RunDrafter, RunInfo
from domino_jax.evals.summary import figures_of, identical_outputs
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import from_primary, refuse_differences
from domino_jax.runtime.errors import DominoError
from domino_jax.weights.loading import LoadedTarget

LEVEL_FIGURES = (
    *("answers", "tokens", "seconds", "tokens_per_second", "prefill_seconds", "output_tokens_per_second"),
    *("tau_pooled", "speedup", "speedup_end_to_end", "drafts_per_round", "intervals"),
)


def decode_prompts(
    target: LoadedTarget,
    drafters: Mapping[str, RunDrafter],
    prompts: Sequence[Prompt],
    info: RunInfo,
    output: Path,
    restart: bool = False,
) -> dict[str, dict[str, Any]]:
    """Decodes prompts in every mode of every drafter into the folder `output`; returns the reports by drafter.

    Args:
        target: for its tokenizer and stop ids; the weights that run are those of the drafters' models.
        drafters: by the folder of their report in `output`: "", which is `output`, where there is one.
        prompts: for which there is room (prompts_with_room).
        restart: begin from scratch where `output` holds an unfinished run of something else, instead of refusing it.
    """
    settings = info.requested
    if (most := max(settings.concurrency, default=0)) > len(prompts):
        raise DominoError(
            f"decode.concurrency has {most}, but there are {len(prompts)} prompts, which would be fewer rows; decode"
            " more prompts, or lower it."
        )
    codec = TextCodec(target.tokenizer, settings.thinking)
    lanes = drafter_lanes(drafters, target.stop_ids)
    infos = {name: info.loaded(name, drafter, target, prompts) for name, drafter in drafters.items()}

    def lanes_of(batch_size: int) -> list[Lane]:
        same = batch_size == settings.batch_size  # then nothing has to be compiled again
        return lanes if same else drafter_lanes(drafters, target.stop_ids, batch_size)

    if not distributed.is_primary():  # takes part in every computation, and writes to a folder that is not kept
        output = Path(tempfile.mkdtemp(prefix="domino-decode-"))
    refuse_differences({"what is decoded": info.origin()})
    with RunFiles(output, info.origin(), restart) as files:
        refuse_continuation(files)
        measured = run_lanes(lanes, prompts, codec, settings.batch_size, files, bool(info.simulated))
        first = next(iter(infos.values()))  # several are measured at one batch size
        measured.concurrency = measure_concurrency(lanes_of, prompts, codec, files, first)
    reports = {}
    for name in drafters:
        by_mode = {lane.mode: lane for lane in lanes if lane.drafter in (name, None)}
        reports[name] = report_lanes(by_mode, measured, infos[name], prompts, output / name)
    return reports


def report_lanes(
    by_mode: Mapping[str, Lane], measured: Measured, info: RunInfo, prompts: Sequence[Prompt], folder: Path
) -> dict[str, Any]:
    """Times rounds, writes the report of the lanes of one drafter into `folder` and returns it."""

    def of(runs: Mapping[str, ModeRun]) -> dict[str, ModeRun]:
        return {mode: runs[lane.name] for mode, lane in by_mode.items()}

    report = build_report(
        of(measured.runs),
        info,
        tasks={task: of(runs) for task, runs in measured.tasks.items()},
        concurrency=measured.concurrency,
        split=time_rounds(by_mode, prompts),
    )
    write_report(folder, report)
    return report


def drafter_lanes(
    drafters: Mapping[str, RunDrafter], stop_ids: Sequence[int], batch_size: int | None = None
) -> list[Lane]:
    """A lane of plain decoding, which every speed-up is against, then one for each mode of each drafter."""
    lanes = []
    for name, drafter in drafters.items():
        settings, models = drafter.settings, drafter.models
        settings = settings.change(batch_size=batch_size or settings.batch_size)
        generator = new_generator(models, settings, stop_ids)
        if BASELINE in settings.modes and not lanes:
            lanes.append(Lane(BASELINE, BASELINE, models, generator))
        if not models.drafter:
            continue
        kind = models.drafter.config
        modes = [mode for mode in supported_modes(settings.modes, kind) if mode != BASELINE]
        if not modes:
            raise DominoError(
                f"{drafter.identity['path']} is a drafter of head {kind.head}, which has none of decode.modes"
                f" {', '.join(settings.modes)} but plain decoding; add {DRAFT}, or take the drafter out of"
                " decode.compare."
            )
        lanes += [Lane(f"{name}/{mode}".strip("/"), mode, models, generator, name or None) for mode in modes]
    return lanes


def refuse_continuation(files: RunFiles) -> None:
    """Several processes run the same groups, and only process 0 could know which ones an earlier start did."""
    if from_primary(lambda: bool(files.records)) and jax.process_count() > 1:
        raise DominoError(
            "--output holds an unfinished decoding, and a run of several processes cannot be continued: choose another"
            " --output, or continue it with one process."
        )


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
    """
    first_turns = [dataclasses.replace(prompt, later_turns=(), task=None) for prompt in prompts]
    done = {str(record["concurrency"]): record["level"] for record in files.records if "concurrency" in record}
    sizes = info.settings.concurrency
    for size in sizes:
        if str(size) not in done:
            measured = run_lanes(lanes_of(size), first_turns, codec, size, None, bool(info.simulated))
            figures = figures_of(measured.runs, info)
            modes = {mode: {key: values[key] for key in LEVEL_FIGURES} for mode, values in figures.items()}
            level = {"modes": modes, "identical_outputs": identical_outputs(measured.runs)}
            files.append({"concurrency": size, "level": level}, [])
            done[str(size)] = level
    return {str(size): done[str(size)] for size in sizes}
