"""Decode prompts in several modes side by side and report what that measured.

    python -m domino_jax.decode --config=configs/tiny.py --output=/tmp/decoded
    python -m domino_jax.decode --config=configs/tiny.py --prompt="Laura has 46 plums. She buys 9. How many now?"
    python -m domino_jax.decode --config=configs/tiny.py --interactive
    python -m domino_jax.decode --config=configs/qwen3_8b.py --config.drafter.path=DIR --output=DIR \\
        --config.decode.tasks="('gsm8k','humaneval=HumanEval.jsonl')"

--output is a folder: generations.jsonl and progress.jsonl (written as groups of prompts finish), report.json,
report.md, table.md, table.tex, plots/. A folder with a report is finished and only shown. One without was interrupted:
the same command goes on behind its last whole group, and the report says in how many sittings it was measured.

--prompt without --output, and --interactive, show the text as it is committed instead.

config.decode.tasks decodes benchmark tasks instead of prompts (data/tasks.py), config.decode.concurrency measures the
throughput at several batch sizes as well, and config.decode.compare several drafters in one run (compare.py).
"""

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from domino_jax.data.prompts import read_prompts
from domino_jax.data.tasks import read_tasks
from domino_jax.decoding.api import prompt_row
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import DecodeSettings, decode_settings, supported_modes
from domino_jax.decoding.stored_tuning import tuned_settings
from domino_jax.drafters.drafter import Drafter, DrafterConfig
from domino_jax.drafters.pair import Models
from domino_jax.evals.compare import COMPARISON, LATEX, PAGE, compare_drafters, drafter_names
from domino_jax.evals.concurrency import measure_concurrency
from domino_jax.evals.describe import describe, run_identity, timings
from domino_jax.evals.lanes import Lane
from domino_jax.evals.models import Loader, decode_mesh
from domino_jax.evals.report import REPORT, build_report, console_table, read_report, refuse_obstacles, write_report
from domino_jax.evals.run import Speech, check_rows, check_words, run_lanes
from domino_jax.evals.run_files import GENERATIONS, RunFiles, refuse_other_run
from domino_jax.evals.tree_report import acceptance, draw_trees, record_trees
from domino_jax.export import EXPORT_DTYPE
from domino_jax.recipe import checks as recipes
from domino_jax.recipe import cli
from domino_jax.recipe.builders import drafter_config_of
from domino_jax.recipe.terminal import at_terminal, check_flags
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import from_primary
from domino_jax.runtime.cores import kept_to
from domino_jax.runtime.errors import DominoError, first_line, refuse_read_only
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.preemption import Preemption
from domino_jax.weights.loading import LoadedTarget, cast_target, check_head, needs_drafter
from domino_jax.weights.random_weights import made_up_prompts

PICTURED = 8  # prompts whose trees are recorded


def main(flags: cli.Flags) -> None:
    # ---------------------------------------------------------------- recipe
    config = flags.config
    recipes.check(config, "decode")
    check_flags(flags)
    over = config.decode.mesh
    if (over.data, over.tensor) != (1, 1):
        distributed.initialize(flags.distributed, preemptible=False)
    mesh = decode_mesh(over.data, over.tensor, config.decode.batch_size)
    # Several drafters are compared with one setting, so none of them brings its own tuning.
    settings = tuned_settings(config.decode, None if config.decode.compare else config.drafter.path)
    made_up = functools.partial(drafter_config_of, config.drafter)
    loader = Loader(config.target.path, settings, mesh, made_up, over.split_head)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), memory_told(settings), kept_to(settings.cores):
        if flags.output:
            with Preemption() as preemption, preemption.nothing_to_lose():  # whole groups are on the disk
                measure(flags, loader)
        else:
            at_terminal(flags, loader)


@contextlib.contextmanager
def memory_told(settings: DecodeSettings):
    """A device without enough memory is a matter of the recipe's sizes; every other failure of it stays as it is."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise DominoError(
            f"the device has no memory for decode.batch_size {settings.batch_size} with decode.cache_length"
            f" {settings.cache_length} ({first_line(error, with_class=False)}); lower one of them."
        ) from error


# ------------------------------------------------------------------------------------------------- into a report


def measure(flags: cli.Flags, loader: Loader) -> None:
    """All modes on all prompts, into the folder --output."""
    config, settings = flags.config, loader.settings
    if is_remote(flags.output):
        raise DominoError(
            f"--output={flags.output} is in a bucket, whose files cannot be appended to; name a local folder, and copy"
            " it when it is finished."
        )
    output = Path(flags.output).expanduser()
    compare = tuple(config.decode.compare)
    if compare and jax.process_count() > 1:
        raise DominoError(
            f"decode.compare writes from one process, and there are {jax.process_count()}; compare in one, or decode"
            " with one drafter at a time."
        )
    folders = dict(zip(drafter_names(compare), compare, strict=True))
    written = (PAGE, LATEX) if compare else ()
    refuse_obstacles(epath.Path(output), files=written, folders=tuple(folders))
    named = {
        "settings": settings.as_json(),
        "target": {"path": recipes.portable(config.target.path)},
        "drafter": named_drafter(config.drafter.path, compare, settings.modes),
        "prompts": prompt_source(flags, config.decode),
    }
    # Every process looks, so that each refuses what it finds; process 0 may be the only one to see the files.
    shown = shown_already(output, named, COMPARISON if compare else REPORT)
    if from_primary(lambda: shown):
        return
    refuse_read_only(output)
    loaded = loader.target()
    rows = read_rows(flags, config.decode, loaded)
    if compare:
        drafting = ("backbone",)  # a head is asked for only of the drafters that have one
        drafters = {
            name: (recipes.portable(path), loader.models(loaded, path, drafting)) for name, path in folders.items()
        }
        compare_drafters(loaded, drafters, rows, settings, output, named)
        print((output / PAGE).read_text(encoding="utf-8"))
    else:
        models = loader.models(loaded, config.drafter.path, settings.modes)
        report = decode_rows(models, loaded, rows, settings, output, named)
        if flags.prompt:
            print(read_text(output, settings.modes[-1]))
        console_table(report)
    print(f"written to {output}")


def named_drafter(path: str | None, compare: Sequence[str], modes: Sequence[str]) -> dict[str, Any] | None:
    """What the report calls the drafter; None for plain decoding."""
    if compare:
        return {"paths": [recipes.portable(folder) for folder in compare]}
    return {"path": recipes.portable(path or "")} if needs_drafter(modes) else None


def prompt_source(flags: cli.Flags, decode) -> dict[str, Any]:
    """Where the prompts come from, as the report says it: --prompt, --prompts, or the recipe's tasks or prompts."""
    tasks = list(decode.tasks)
    if tasks and (flags.prompts or flags.prompt):
        given = "--prompts" if flags.prompts else "--prompt"
        raise DominoError(f"config.decode.tasks and {given} are both given; decode tasks or prompts, not both.")
    source = "tasks" if tasks else "--prompt" if flags.prompt else flags.prompts or decode.prompts
    if not source and decode.simulate_tau:
        source = "made up"
    if not source:
        raise DominoError(
            "there are no prompts: give --prompts=FILE.jsonl or --prompt=TEXT, or set config.decode.prompts or"
            " config.decode.tasks."
        )
    limit = None if tasks else decode.num_prompts
    named = {"source": recipes.portable(source), "text": flags.prompt, "limit": limit}
    return {**named, "tasks": [recipes.portable(entry) for entry in tasks]}


def read_rows(flags: cli.Flags, decode, loaded: LoadedTarget) -> list[dict[str, Any]]:
    """The prompt rows of the recipe's tasks, of the file that is given, of --prompt, or made-up ones."""
    if decode.tasks:
        return read_tasks(tuple(decode.tasks))
    if flags.prompt:
        return [{"id": "prompt", **prompt_row(flags.prompt, loaded.tokenizer)}]
    path = flags.prompts or decode.prompts
    if not path:
        return made_up_prompts(decode.num_prompts or 1, loaded.model.config.vocab_size)
    return read_prompt_rows(path, decode.num_prompts, loaded.tokenizer)


def read_prompt_rows(path: str, limit: int, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of a prompts file without the keys that only tasks have; limit 0: all. A bad checker is a DataError."""
    return [
        {key: value for key, value in row.items() if key not in ("task", "next_turns")}
        for row in read_prompts(path, limit or None, functools.partial(check_words, tokenizer=tokenizer))
    ]


def shown_already(output: Path, named: Mapping[str, Any], name: str) -> bool:
    """Whether `output` holds this very run, finished; then it is shown. A finished run of something else is refused."""
    finished = read_report(output, name)
    if finished is None:
        return False
    refuse_other_run(output, "a finished decoding", finished, named)
    print(f"{output} holds a finished decoding; this is its report. Choose another --output to decode again.")
    if name == REPORT:
        console_table(finished)
    else:
        print((output / PAGE).read_text(encoding="utf-8"))
    return True


def decode_with(
    config, loaded: LoadedTarget, drafter_config: DrafterConfig, drafter_params: dict, output: os.PathLike
) -> dict[str, Any]:
    """The final decoding of a training run: its drafter, rounded as its export is, on the recipe's held-out prompts."""
    settings = dataclasses.replace(decode_settings(config.decode), simulate_tau=0.0, concurrency=())
    settings = dataclasses.replace(settings, modes=supported_modes(settings.modes, drafter_config.has_head))
    source = config.decode.prompts or config.eval.prompts
    rows = read_prompt_rows(source, config.decode.num_prompts, loaded.tokenizer)
    target = cast_target(loaded, settings.dtype)
    models = Models(target.model, target.params)
    if needs_drafter(settings.modes):
        drafter = Drafter(drafter_config, np.dtype(settings.dtype))
        rounded = jax.tree.map(lambda leaf: leaf.astype(EXPORT_DTYPE).astype(settings.dtype), drafter_params)
        models = Models(target.model, target.params, drafter, rounded)
    limit = config.decode.num_prompts
    named = {
        "settings": settings.as_json(),
        "target": {"path": recipes.portable(config.target.path)},
        "drafter": {"path": f"{os.fspath(output).rpartition('/')[0]}/export"} if models.drafter else None,
        "prompts": {"source": recipes.portable(source), "text": None, "limit": limit, "tasks": []},
    }
    with kept_to(settings.cores):
        if not is_remote(output):
            # What an interrupted decoding of other weights left there is of no use: the training has gone on since.
            return decode_rows(models, target, rows, settings, Path(output), named, anew=True)
        # A bucket's files can be neither continued nor cut: decoded here, and copied when it is whole.
        with tempfile.TemporaryDirectory(prefix="domino-decode-") as scratch:
            report = decode_rows(models, target, rows, settings, Path(scratch), named)
            copy_folder(Path(scratch), epath.Path(output))
            return report


def copy_folder(here: Path, there: epath.Path) -> None:
    """Every file below `here` to the same place below `there`, report.json last: with it the folder is finished."""
    files = [path for path in here.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == REPORT):
        target = there / path.relative_to(here).as_posix()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())


def decode_rows(
    models: Models,
    target: LoadedTarget,
    rows: Sequence[Mapping[str, Any]],
    settings: DecodeSettings,
    output: Path,
    named: Mapping[str, Any],
    anew: bool = False,
) -> dict[str, Any]:
    """Decodes prompt rows (each with an "id") in every mode into the folder `output`, and returns the report.

    Args:
        target: for its tokenizer and stop ids; the weights that run are those of `models`.
        rows: as data/prompts.py and data/tasks.py read them.
        named: what the report says about where things came from: "settings", "target", "drafter", "prompts".
        anew: begin anew where `output` holds an unfinished run of something else, instead of refusing it.
    """
    if needs_drafter(settings.modes):
        check_head(models.drafter is not None and models.drafter.config.has_head, settings.modes)
    speech = Speech(target.tokenizer, settings.thinking)

    lanes = mode_lanes(models, target, settings, settings.batch_size)
    check_rows(lanes, rows, speech)
    facts = describe(models, target, rows, settings, named)

    def lanes_of(batch_size: int) -> list[Lane]:
        same = batch_size == settings.batch_size  # then nothing has to be compiled again
        return lanes if same else mode_lanes(models, target, settings, batch_size)

    if not distributed.is_primary():  # runs along, and writes where nobody looks
        output = Path(tempfile.mkdtemp(prefix="domino-decode-"))
    with RunFiles(output, run_identity(named, rows, settings, models), anew) as files:
        refuse_divided_sittings(files)
        measured = run_lanes(lanes, rows, speech, settings.batch_size, files, bool(facts["simulated"]))
        throughput = measure_concurrency(lanes_of, settings.concurrency, rows, speech, files, facts)
    report = build_report(
        measured.runs,
        tasks=measured.tasks,
        batch_size=settings.batch_size,
        facts=facts,
        concurrency=throughput,
        sittings=files.sittings,
        **timings({lane.mode: lane for lane in lanes}, rows, speech),
    )
    if "tree" in settings.modes:
        report["tree"] = look_at_trees(lanes[0], rows, speech, output)
    write_report(output, report)
    return report


def look_at_trees(lane: Lane, rows: Sequence[Mapping[str, Any]], speech: Speech, output: Path) -> dict[str, Any]:
    """Acceptance by depth and rank over the first rounds of a few prompts, and plots/trees.png with some of them."""
    prompts = [speech.encode(row) for row in rows[:PICTURED]]
    trees = [tree for recorded in record_trees(lane.models, lane.generator, prompts) for tree in recorded]
    if not trees:  # every answer ended with its first token
        return {}
    draw_trees(trees, lambda token: speech.text([token]) or str(token), output / "plots")
    return acceptance(trees)


def refuse_divided_sittings(files: RunFiles) -> None:
    """Several processes run the same groups, and only process 0 could know which ones an earlier sitting did."""
    if from_primary(lambda: bool(files.records)) and jax.process_count() > 1:
        raise DominoError(
            "--output holds an unfinished decoding, and a run of several processes cannot be continued: choose another"
            " --output, or go on with one process."
        )


def mode_lanes(models: Models, target: LoadedTarget, settings: DecodeSettings, batch_size: int) -> list[Lane]:
    """A lane for each mode, all of one generator."""
    generator = new_generator(models, settings.generator(target.stop_ids, batch_size))
    return [Lane(mode, mode, models, generator) for mode in settings.modes]


def read_text(output: Path, mode: str) -> str:
    """The text that `mode` gave to the first prompt, or its ids without a tokenizer."""
    lines = (output / GENERATIONS).read_text(encoding="utf-8").splitlines()
    row = next(row for row in map(json.loads, lines) if row["mode"] == mode)
    return row["text"] if row["text"] is not None else str(row["token_ids"])


if __name__ == "__main__":
    cli.run(main, required=("config",), optional=("output", "prompts", "prompt", "interactive", "distributed"))
