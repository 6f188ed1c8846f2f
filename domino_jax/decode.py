"""Decode prompts in several modes side by side and report speed, acceptance and equality.

    python -m domino_jax.decode --config=configs/tiny.py --output=/tmp/decoded
    python -m domino_jax.decode --config=configs/tiny.py --prompt="Laura has 46 plums. She buys 9. How many now?"
    python -m domino_jax.decode --config=configs/tiny.py --interactive
    python -m domino_jax.decode --config=configs/qwen3_8b.py --config.drafter.path=DIR --output=DIR \\
        --config.decode.tasks="('gsm8k','humaneval=HumanEval.jsonl')"

--output is a folder: generations.jsonl and progress.jsonl (written as groups of prompts finish), report.json,
report.html, plots/. A folder with a report is finished: its report is shown again.
Without a report the run was interrupted: the same command continues after its last complete group.

--prompt without --output, and --interactive, show the text as it is committed instead.

--dry_run prints what a step and rounds of some widths must read, from shapes alone (forecast/rounds.py).

config.decode.tasks decodes benchmark tasks instead of prompts (data/tasks.py), config.decode.concurrency also measures
the throughput at several batch sizes, and config.decode.compare several drafters in one run (evals/compare.py).
"""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import rich.console

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.api import Decoder
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.settings import DRAFT, DecodeSettings, default_modes
from domino_jax.decoding.terminal import chat, show
from domino_jax.evals.compare import COMPARISON, console_comparison, drafter_names, write_comparison
from domino_jax.evals.measure import decode_prompts
from domino_jax.evals.models import Loader, lower_to_drafter, needs_drafter
from domino_jax.evals.prompts import prepare_prompts, prompts_with_room
from domino_jax.evals.report import REPORT, console_table, output_folder, read_report
from domino_jax.evals.run_files import refuse_other_run
from domino_jax.evals.run_info import PromptSource, RunDrafter, RunInfo
from domino_jax.forecast import rounds as forecast_rounds
from domino_jax.recipe import cli, rules
from domino_jax.recipe.builders import loader_of
from domino_jax.recipe.decode_flags import check_flags
from domino_jax.recipe.open_keys import decode_settings, width_of
from domino_jax.recipe.prompt_rows import prompt_source, read_rows, report_limit
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import from_primary
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.small_models import use_one_thread
from domino_jax.weights import hf
from domino_jax.weights.drafter import stored_head
from domino_jax.weights.identity import drafter_identity, identity_if_there, target_identity
from domino_jax.weights.loading import LoadedTarget, keep_compiled, use_exact_matmuls


def main(flags: cli.Flags) -> None:
    # 1. The recipe, and the flags beside it.
    config = flags.config
    made_up = flags.dry_run or config.decode.simulate_tau  # a drafter by its shapes
    rules.check(config, "decode_dry_run" if made_up else "decode", flags.set_keys, flags.given)
    if flags.dry_run:
        return forecast_rounds.main(flags)
    check_flags(flags)
    keep_compiled()

    # 2. The processes, where they share a mesh; a small model on a CPU has one thread.
    shape = config.decode.mesh
    one_row = config.decode.batch_size == 1 and not config.decode.concurrency
    if one_row and (shape.data, shape.tensor) == (1, 1) and (note := use_one_thread(config.target.path)):
        print(note)
    if (shape.data, shape.tensor) != (1, 1):
        distributed.initialize(flags.distributed, preemptible=False)

    # 3. The settings, and the devices.
    path = None if config.decode.compare else config.drafter.path
    head = stored_head(path) if path and config.decode.modes is None else config.drafter.head  # for open modes
    settings = decode_settings(config.decode, head, config.data.train)
    use_exact_matmuls(settings.dtype)
    loader = loader_of(flags, settings)
    with loader.on_mesh(), memory_refused(settings):
        if not flags.output:
            at_terminal(flags, loader)
            return

        # 4. The output: a finished one is shown. Every process looks, so that each refuses what it finds; process 0
        # may be the only one to see the files.
        output, folders = output_folder(flags.output), drafter_folders(flags)
        source = prompt_source(flags)
        shown = show_finished(flags, settings, output, source)
        if from_primary(lambda: shown):
            return
        if distributed.is_primary():
            output.mkdir(parents=True, exist_ok=True)  # now, and not after minutes of loading

        # 5. Target and prompts.
        loaded = loader.target()
        codec = TextCodec(loaded.tokenizer, settings.thinking)
        rows, source = read_rows(source, config, loaded.tokenizer)
        report_limit(source, len(rows))
        info = run_info(flags, settings, source, target_identity(config.target.path))
        prompts = prepare_prompts(rows, codec)

        # 6. The drafters, and decoding.
        drafters = load_drafters(flags, folders, loader, loaded, info)
        generators = [new_generator(drafter.models, drafter.settings) for drafter in drafters.values()]
        prompts = prompts_with_room(generators, prompts, codec, config.data.skip_bad_rows)
        reports = decode_prompts(loaded, drafters, prompts, info, output)

        # 7. The report, and of several drafters the comparison.
        if distributed.is_primary():
            show_report(write_comparison(output, info, reports) if config.decode.compare else reports[""])
        say(f"written to {output}")


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
        settings = lower_to_drafter(settings, models.drafter.config)
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


@contextlib.contextmanager
def memory_refused(settings: DecodeSettings):
    """Turns a device's lack of memory into a message about the recipe's sizes; other errors pass unchanged."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        rows = max((settings.batch_size, *settings.concurrency))
        raise DominoError(
            f"the device has no memory for {rows} rows (decode.batch_size, decode.concurrency) with decode.cache_length"
            f" {settings.cache_length} ({first_line(error, with_class=False)}); lower one of them."
        ) from error


def run_info(flags: cli.Flags, settings: DecodeSettings, source: PromptSource, identity: dict) -> RunInfo:
    """What the flags, the recipe and the folders say about the run; identity: the target's."""
    config, drafter = flags.config, None
    if config.decode.compare:
        paths = list(config.decode.compare)
        drafter = {"paths": paths, "weights": [drafter_identity(path)["weights"] for path in paths]}
    elif needs_drafter(settings.modes):
        path = config.drafter.path or ""
        drafter = {"path": path, **(drafter_identity(path) if path else {})}
    target = {"path": config.target.path, "quantize": config.target.quantize, **identity}
    return RunInfo(settings, target, drafter, source)


def drafter_folders(flags: cli.Flags) -> dict[str, str]:
    """The drafters' folders by name, "" of a single one."""
    compared = tuple(flags.config.decode.compare)
    if compared and jax.process_count() > 1:
        raise DominoError(
            f"decode.compare writes from one process, but there are {jax.process_count()}; compare in one, or decode"
            " with one drafter at a time."
        )
    if not compared:
        return {"": flags.config.drafter.path}
    return dict(zip(drafter_names(compared, "config.decode.compare"), compared, strict=True))


def show_finished(flags: cli.Flags, settings: DecodeSettings, output: Path, source: PromptSource) -> bool:
    """Shows the report that `output` already holds, if any. A finished run of something else is refused."""
    name = COMPARISON if flags.config.decode.compare else REPORT
    finished = read_report(output, name)
    if finished is None:
        return False
    path = flags.config.target.path
    target = identity_if_there(path, finished["target"]["path"])
    if target:
        _, source = read_rows(source, flags.config, hf.load_tokenizer(hf.resolve_folder(path)))
    else:  # the prompts cannot be encoded
        source = dataclasses.replace(source, sha256=finished["prompts"]["sha256"])
    info = run_info(flags, settings, source, target or {})
    refuse_other_run(output, "a finished decoding", finished, info.origin())
    print(f"{output} holds a finished decoding; this is its report. Choose another --output to decode again.")
    show_report(finished)
    return True


def show_report(report: Mapping[str, Any]) -> None:
    """Prints the tables of a report.json or a compare.json."""
    (console_comparison if "drafters" in report else console_table)(report)


def load_drafters(
    flags: cli.Flags, folders: Mapping[str, str], loader: Loader, loaded: LoadedTarget, info: RunInfo
) -> dict[str, RunDrafter]:
    """The drafters by name. Each of several has the modes that its head allows, or its default ones where the recipe
    leaves them open."""
    drafters = {}
    for index, (name, path) in enumerate(folders.items()):
        settings, identity, prefix = info.requested, info.drafter, ""
        if name:
            identity, prefix = {"path": path, "weights": info.drafter["weights"][index]}, f"{name}: "
        models = loader.models(loaded, path, (DRAFT,) if name else settings.modes)  # all drafters have mode draft
        if name and flags.config.decode.modes is None:
            settings = settings.change(modes=default_modes(models.drafter.config))
        if models.drafter:
            settings = lower_to_drafter(settings, models.drafter.config, lambda note, prefix=prefix: say(prefix + note))
        drafters[name] = RunDrafter(models, settings, identity)
    return drafters


if __name__ == "__main__":
    cli.run(
        main,
        required=("config",),
        optional=("output", "prompts", "prompt", "interactive", "distributed", "dry_run", "topology"),
    )
