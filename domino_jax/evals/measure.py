"""A measured run of one drafter: prompts in every mode, throughput by batch size, the report."""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.evals.lanes import Lane, ModeRun
from domino_jax.evals.prompts import Prompt
from domino_jax.evals.report import build_report, write_report
from domino_jax.evals.run import Measured, run_lanes, time_rounds
from domino_jax.evals.run_files import RunFiles
from domino_jax.evals.run_info import RunInfo
from domino_jax.evals.summary import figures_of, identical_outputs
from domino_jax.method.pair import Models
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import from_primary, refuse_differences
from domino_jax.runtime.errors import DominoError
from domino_jax.weights.loading import LoadedTarget

LEVEL_FIGURES = (
    *("answers", "tokens", "seconds", "tokens_per_second", "prefill_seconds", "output_tokens_per_second"),
    *("tau_pooled", "speedup", "speedup_end_to_end", "drafts_per_round", "intervals"),
)


def decode_prompts(
    models: Models,
    target: LoadedTarget,
    prompts: Sequence[Prompt],
    info: RunInfo,
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Decodes prompts in every mode into the folder `output`, and returns the report.

    Args:
        prompts: for which there is room (prompts_with_room).
        target: for its tokenizer and stop ids; the weights that run are those of `models`.
        info: with the settings in effect (`RunInfo.loaded`).
        restart: begin from scratch where `output` holds an unfinished run of something else, instead of refusing it.
    """
    settings = info.settings
    if (most := max(settings.concurrency, default=0)) > len(prompts):
        raise DominoError(
            f"decode.concurrency has {most}, but there are {len(prompts)} prompts, which would be fewer rows; decode"
            " more prompts, or lower it."
        )
    codec = TextCodec(target.tokenizer, settings.thinking)
    lanes = mode_lanes(models, target, settings, settings.batch_size)

    def lanes_of(batch_size: int) -> list[Lane]:
        same = batch_size == settings.batch_size  # then nothing has to be compiled again
        return lanes if same else mode_lanes(models, target, settings, batch_size)

    if not distributed.is_primary():  # takes part in every computation, and writes to a folder that is not kept
        output = Path(tempfile.mkdtemp(prefix="domino-decode-"))
    refuse_differences({"what is decoded": json.dumps(info.origin())})
    with RunFiles(output, info.origin(), restart) as files:
        refuse_continuation(files)
        measured = run_lanes(lanes, prompts, codec, settings.batch_size, files, bool(info.simulated))
        measured.concurrency = measure_concurrency(lanes_of, prompts, codec, files, info)
    return report_lanes(lanes, measured, info, prompts, output)


def report_lanes(
    lanes: Sequence[Lane],
    measured: Measured,
    info: RunInfo,
    prompts: Sequence[Prompt],
    folder: Path,
) -> dict[str, Any]:
    """Times rounds, writes the report of lanes with different modes and returns it.

    Args:
        measured: sums of these lanes, and perhaps of others.  folder: of the report.
    """
    by_mode = {lane.mode: lane for lane in lanes}

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


def mode_lanes(models: Models, target: LoadedTarget, settings: DecodeSettings, batch_size: int) -> list[Lane]:
    """A lane for each mode, all with one generator."""
    generator = new_generator(models, settings.change(batch_size=batch_size), target.stop_ids)
    return [Lane(mode, mode, models, generator) for mode in settings.modes]


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

    Args:
        lanes_of: batch size → lanes.
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
