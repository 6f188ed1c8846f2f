"""From flags and a recipe to a decoding: refusals, prompts, settings that fit the drafter, the end of a training."""

import dataclasses
import functools
import io
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import rich.console
from etils import epath

from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import digest_rows, read_lines, read_prompts
from domino_jax.data.tasks import read_tasks
from domino_jax.decoding.api import Decoder, prompt_row
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.requests import request_of
from domino_jax.decoding.settings import DecodeSettings, supported_modes
from domino_jax.decoding.terminal import chat, show
from domino_jax.evals.measure import decode_prompts
from domino_jax.evals.models import Loader, check_simulation, needs_drafter
from domino_jax.evals.predicted import predicted_rounds
from domino_jax.evals.prompts import Prompt, prepare_prompts, prompts_with_room
from domino_jax.evals.report import REPORT, write_report
from domino_jax.evals.run_info import PromptSource, RunInfo
from domino_jax.method.drafters import CONFIGS, AnyConfig, AnyDrafter
from domino_jax.method.pair import Models
from domino_jax.models.sharding import replicated
from domino_jax.recipe import cli
from domino_jax.recipe.values import decode_settings, width_of
from domino_jax.runtime import distributed
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.remote import copy_folder
from domino_jax.weights.identity import drafter_identity
from domino_jax.weights.loading import LoadedTarget, load_models, load_target, use_exact_matmuls
from domino_jax.weights.random_weights import made_up_prompts
from domino_jax.weights.target import Sharding, read_target_config

MADE_UP = "made up"  # as the source of prompts


def check_flags(flags: cli.Flags) -> None:
    """Raises DominoError for flags of which one would be ignored, before anything is loaded."""
    decode, shown = flags.config.decode, "--interactive" if flags.interactive else "--prompt"
    _check_prompt_flags(flags)
    if decode.compare and decode.concurrency:
        raise DominoError(
            "config.decode.compare and config.decode.concurrency are both given, but drafters are compared at"
            " decode.batch_size alone; remove one of them."
        )
    if decode.compare and decode.parity == "fixed_shape":
        raise DominoError(
            "config.decode.parity is 'fixed_shape', in which plain decoding is as wide as one drafter's rounds, but"
            " config.decode.compare has several drafters: set parity to near_tie, or decode with one at a time."
        )
    if flags.output:
        return
    if not (flags.prompt or flags.interactive):
        raise DominoError("--output is missing (a folder for the report); without it give --prompt or --interactive.")
    for name in ("tasks", "compare", "concurrency", "simulate_tau"):
        if decode[name]:
            raise DominoError(
                f"config.decode.{name} is {decode[name]!r}, but {shown} without --output only shows one text: add"
                f" --output=FOLDER, or remove decode.{name}."
            )


def _check_prompt_flags(flags: cli.Flags) -> None:
    if flags.prompt is not None and not flags.prompt.strip():
        raise DominoError("--prompt is empty; give it a text, or leave it out to decode the recipe's prompts.")
    flag = "--prompts" if flags.prompts else "--prompt" if flags.prompt else None
    if flags.prompts and flags.prompt:
        raise DominoError("--prompts and --prompt are both given; decode the rows of a file or one text, not both.")
    if flags.config.decode.tasks and flag:
        raise DominoError(f"config.decode.tasks and {flag} are both given; decode tasks or prompts, not both.")
    if flags.interactive:
        for name, value in (("--output", flags.output), ("--prompt", flags.prompt), ("--prompts", flags.prompts)):
            if value:
                raise DominoError(f"--interactive and {name} are both given, but a chat ignores {name}; remove it.")


# ------------------------------------------------------------------------------------------------- prompts


def prompt_source(flags: cli.Flags) -> PromptSource:
    """Where the prompts come from: --prompt, --prompts, the recipe's tasks or prompts, or none (made up)."""
    decode = flags.config.decode
    tasks = tuple(decode.tasks)
    source = "tasks" if tasks else "--prompt" if flags.prompt else flags.prompts or flags.config.eval.prompts
    if not source and decode.simulate_tau:
        source = MADE_UP
    if not source:
        raise DominoError(
            "there are no prompts: give --prompts=FILE.jsonl or --prompt=TEXT, or set config.eval.prompts or"
            " config.decode.tasks."
        )
    return PromptSource(source, flags.prompt, None if tasks else decode.num_prompts, tasks)


def read_rows(source: PromptSource, config, tokenizer: Any) -> tuple[list[dict[str, Any]], PromptSource]:
    """The prompt rows of a source, and the source with their digest; tokenizer: the target's."""
    if source.tasks:
        rows = read_tasks(source.tasks)
    elif source.text:
        rows = [{"id": "prompt", **prompt_row(source.text, tokenizer)}]
    elif source.source == MADE_UP:
        rows = made_up_prompts(source.limit or 1, read_target_config(config.target.path).vocab_size)
    else:
        check = functools.partial(check_row, TextCodec(tokenizer, config.decode.thinking))
        rows = read_file_rows(source.source, source.limit, config.data.skip_bad_rows, check)
    return rows, dataclasses.replace(source, sha256=digest_rows(rows))


def report_limit(source: PromptSource, rows: int) -> None:
    """Prints how many prompts of a file are decoded where decode.num_prompts leaves some out."""
    if source.limit == rows and source.source not in (MADE_UP, "--prompt"):
        total = sum(1 for _ in read_lines(source.source))
        if total > rows:
            say(f"{source.source}: {rows} of {total} prompts (config.decode.num_prompts; 0 decodes all)")


def check_row(codec: TextCodec, row: dict[str, Any]) -> None:
    """Refuses a prompt row that cannot be encoded or whose sampling values are out of range."""
    codec.encode(row)
    request_of(row, 0)


def read_file_rows(
    path: str, limit: int, skip_bad: bool = False, check: Callable[[dict], Any] | None = None
) -> list[dict[str, Any]]:
    """Rows of a prompts file, the rows of one task together, in the order in which tasks appear; limit 0: all.

    A "task" that is a text names the row's task, by which the report is divided. "next_turns" is dropped.

    skip_bad, check: of `read_prompts`.
    """
    rows = []
    for row in read_prompts(path, limit or None, skip_bad, check):
        dropped = ("next_turns",) if isinstance(row.get("task"), str) else ("next_turns", "task")
        rows.append({key: value for key, value in row.items() if key not in dropped})
    order = {task: place for place, task in enumerate(dict.fromkeys(row.get("task") for row in rows))}
    return sorted(rows, key=lambda row: order[row.get("task")])


# ------------------------------------------------------------------------------------------------ drafters


def fit_to_drafter(settings: DecodeSettings, drafter: AnyConfig, report: Callable[[str], None] = say) -> DecodeSettings:
    """Settings that the drafter's block allows; `report` takes a note for each value that is lowered."""

    def at_most(key: str, value: int, most: int, reason: str) -> int:
        if value > most:
            report(f"note: config.{key} is {value}, but {reason}: lowered to {most}.")
        return min(value, most)

    most = drafter.most_drafts
    reason = f"this drafter's block of {drafter.block_size} gives at most {most} drafts"
    if not drafter.has_backbone:
        reason = f"this drafter makes at most {most} drafts"
    if settings.drafting.num_drafts is not None:
        settings = settings.change(num_drafts=at_most("decode.num_drafts", settings.drafting.num_drafts, most, reason))
    if tree := settings.drafting.tree:
        tree = dataclasses.replace(tree, depth=at_most("decode.tree.depth", tree.depth, most, reason))
        deepest = settings.change(tree=tree).drafting.width(drafter)
        reason = f"{tree.lanes} lanes of depth {deepest} and the anchor are {tree.lanes * deepest + 1}"
        nodes = at_most("decode.tree.nodes", tree.nodes, tree.lanes * deepest + 1, reason)
        settings = settings.change(tree=dataclasses.replace(tree, nodes=nodes))
    check_simulation(settings, drafter)
    return settings


# ---------------------------------------------------------------------------------------------- the terminal


def at_terminal(flags: cli.Flags, loader: Loader) -> None:
    """--prompt or --interactive without --output: shows the text of the last of decode.modes as it is committed."""
    if flags.interactive and jax.process_count() > 1:
        raise DominoError(
            f"--interactive reads one terminal, but there are {jax.process_count()} processes: chat with one process,"
            " or give all of them --prompt."
        )
    settings = loader.settings
    loaded = loader.target()
    mode = settings.modes[-1]
    models = loader.models(loaded, flags.config.drafter.path, (mode,))
    console = rich.console.Console(file=None if distributed.is_primary() else io.StringIO())
    if models.drafter:
        settings = fit_to_drafter(settings, models.drafter.config)
    width = width_of(flags.config.decode, flags.set_keys) if flags.interactive else settings.width
    generator = new_generator(models, settings.change(batch_size=1, width=width), loaded.stop_ids)
    # The last turn's caches, which are no more than those that the next turn needs anyway.
    prefixes = Prefixes(1, sys.maxsize) if flags.interactive else None
    decoder = Decoder(models, generator, loaded.tokenizer, prefixes)
    sampling = {**vars(settings.sampling), "seed": settings.seed}
    if flags.interactive:
        chat(decoder, mode, console, **sampling)
    else:
        show(decoder, flags.prompt, mode, console, **sampling)


# --------------------------------------------------------------------------------------- a finished training


def final_settings(config, head: str) -> DecodeSettings:
    """The recipe's decode settings that a training run of a drafter with this head ends with."""
    requested = decode_settings(config.decode, head, config.data.train)
    modes = supported_modes(requested.modes, CONFIGS[head])
    return requested.change(simulate_tau=0.0, concurrency=(), modes=modes)


def final_prompts(
    config, loaded: LoadedTarget, models: Models, settings: DecodeSettings
) -> tuple[list[Prompt], PromptSource]:
    """The prompts of `decode_trained`, and where they come from; others are refused together, or left out."""
    codec, generator = TextCodec(loaded.tokenizer, settings.thinking), new_generator(models, settings)
    source = PromptSource(config.eval.prompts, limit=config.decode.num_prompts)
    rows, source = read_rows(source, config, loaded.tokenizer)
    return prompts_with_room([generator], prepare_prompts(rows, codec), codec, config.data.skip_bad_rows), source


def check_final(config, loaded: LoadedTarget, drafter: AnyDrafter) -> list[tuple[int, ...]]:
    """The ids of the prompts of `decode_trained`; those it could not use are refused before hours of training."""
    if not config.eval.final or jax.process_count() > 1:
        return []
    settings = fit_to_drafter(final_settings(config, drafter.config.head), drafter.config)
    models = Models(loaded.model, loaded.params, drafter if needs_drafter(settings.modes) else None)
    return [prompt.token_ids for prompt in final_prompts(config, loaded, models, settings)[0]]


def decode_trained(config, place: Sharding, workdir: epath.Path) -> dict[str, Any]:
    """The final decoding of a training run: its exported drafter on the recipe's held-out prompts.

    Returns the report, which also says how many rounds one pass over the answers predicts (decoding/answers.py).

    place: where the target's weights go.
    """
    requested, output = final_settings(config, config.drafter.head), workdir / "report"
    use_exact_matmuls(requested.dtype)
    path, quantize = config.target.path, config.target.quantize
    target = load_target(path, requested.dtype, place, quantize)
    mesh = jax.sharding.get_mesh()
    export = os.fspath(workdir / "export") if needs_drafter(requested.modes) else None
    models = load_models(target, export, None if mesh.empty else replicated(mesh), requested.drafting)
    settings = fit_to_drafter(requested, models.drafter.config) if export else requested
    prompts, source = final_prompts(config, target, models, settings)
    drafted_with = export and {"path": export, **drafter_identity(export)}
    info = RunInfo(requested, {"path": path, "quantize": quantize, **target.identity}, drafted_with, source)
    info = info.loaded(settings, target, prompts, models)
    # Files in a bucket can be neither appended to nor cut: decoded here, and copied when they are complete.
    with tempfile.TemporaryDirectory(prefix="domino-decode-") if is_remote(output) else nullcontext(output) as folder:
        # An interrupted decoding of other weights there is of no use: the training has gone on since.
        report = decode_prompts(models, target, prompts, info, Path(folder), restart=True)
        report["predicted_rounds"] = predicted_rounds(models, settings, prompts, Path(folder))
        write_report(folder, report)
        if is_remote(output):
            copy_folder(Path(folder), output, REPORT)
    return report
