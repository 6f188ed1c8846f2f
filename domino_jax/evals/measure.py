"""A measured run of one drafter: prompts in every mode, throughput by batch size, a look at trees, the report."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.drafters.pair import Models
from domino_jax.evals.compare import measure_concurrency
from domino_jax.evals.examples import collect_examples
from domino_jax.evals.lanes import Lane
from domino_jax.evals.prompts import Prompt, TextCodec, check_prompts
from domino_jax.evals.report import build_report, write_report
from domino_jax.evals.run import run_lanes, timings
from domino_jax.evals.run_files import RunFiles
from domino_jax.evals.run_info import RunInfo
from domino_jax.evals.tree_report import acceptance, draw_trees, record_trees
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import from_primary
from domino_jax.runtime.errors import DominoError
from domino_jax.weights.loading import LoadedTarget

TREE_PROMPTS = 8  # whose first rounds are recorded for the report


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
        target: for its tokenizer and stop ids; the weights that run are those of `models`.
        info: with the settings in effect (`RunInfo.loaded`).
        restart: begin from scratch where `output` holds an unfinished run of something else, instead of refusing it.
    """
    settings = info.settings
    codec = TextCodec(target.tokenizer, settings.thinking)
    lanes = mode_lanes(models, target, settings, settings.batch_size)
    check_prompts([lanes[0].generator], prompts, codec)

    def lanes_of(batch_size: int) -> list[Lane]:
        same = batch_size == settings.batch_size  # then nothing has to be compiled again
        return lanes if same else mode_lanes(models, target, settings, batch_size)

    if not distributed.is_primary():  # takes part in every computation, and writes to a folder that is not kept
        output = Path(tempfile.mkdtemp(prefix="domino-decode-"))
    with RunFiles(output, info.identity(prompts, [models]), restart) as files:
        refuse_divided_sittings(files)
        measured = run_lanes(lanes, prompts, codec, settings.batch_size, files, bool(info.simulated))
        throughput = measure_concurrency(lanes_of, prompts, codec, files, info)
    report = build_report(
        measured.runs,
        info,
        tasks=measured.tasks,
        concurrency=throughput,
        sittings=files.sittings,
        **timings({lane.mode: lane for lane in lanes}, prompts),
    )
    if "tree" in settings.modes:
        report["tree"] = look_at_trees(lanes[0], prompts[:TREE_PROMPTS], codec, output)
    write_report(output, report, collect_examples(lanes, prompts, codec, output), codec)
    return report


def mode_lanes(models: Models, target: LoadedTarget, settings: DecodeSettings, batch_size: int) -> list[Lane]:
    """A lane for each mode, all with one generator."""
    generator = new_generator(models, settings.generator(target.stop_ids, batch_size))
    return [Lane(mode, mode, models, generator) for mode in settings.modes]


def look_at_trees(lane: Lane, prompts: Sequence[Prompt], codec: TextCodec, output: Path) -> dict[str, Any]:
    """Acceptance by depth and rank over the first rounds of prompts, and plots/trees.png with some of the trees."""
    ids = [prompt.token_ids for prompt in prompts]
    trees = [tree for rounds in record_trees(lane.models, lane.generator, ids) for tree in rounds]
    if not trees:  # every answer ended with its first token
        return {}
    draw_trees(trees, lambda token: codec.decode([token]) or str(token), output / "plots")
    return acceptance(trees)


def refuse_divided_sittings(files: RunFiles) -> None:
    """Several processes run the same groups, and only process 0 could know which ones an earlier sitting did."""
    if from_primary(lambda: bool(files.records)) and jax.process_count() > 1:
        raise DominoError(
            "--output holds an unfinished decoding, and a run of several processes cannot be continued: choose another"
            " --output, or continue it with one process."
        )
