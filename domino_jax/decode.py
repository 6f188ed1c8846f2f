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

config.decode.tasks decodes benchmark tasks instead of prompts (data/tasks.py), config.decode.concurrency also measures
the throughput at several batch sizes, and config.decode.compare several drafters in one run (evals/compare.py).
"""

import contextlib
import functools
from pathlib import Path

import jax
from etils import epath

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import DRAFT, DecodeSettings, default_modes
from domino_jax.evals.compare import COMPARISON, ComparedDrafter, compare_drafters, console_comparison, drafter_names
from domino_jax.evals.measure import decode_prompts
from domino_jax.evals.models import Loader, decode_mesh, needs_drafter
from domino_jax.evals.prompts import prepare_prompts, prompts_with_room
from domino_jax.evals.report import REPORT, console_table, read_report, refuse_file
from domino_jax.evals.run_files import refuse_other_run
from domino_jax.evals.run_info import PromptSource, RunInfo
from domino_jax.recipe import cli, rules
from domino_jax.recipe.builders import drafter_config_of
from domino_jax.recipe.decoding import (
    at_terminal,
    check_flags,
    fit_to_drafter,
    prompt_source,
    read_rows,
    report_limit,
)
from domino_jax.recipe.values import decode_settings
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import from_primary
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.small_models import use_one_thread
from domino_jax.weights import hf
from domino_jax.weights.drafter import stored_head
from domino_jax.weights.identity import drafter_identity, target_identity
from domino_jax.weights.loading import LoadedTarget, keep_compiled, use_exact_matmuls


def main(flags: cli.Flags) -> None:
    # 1. The recipe, and the flags beside it.
    config = flags.config
    rules.check(config, "decode")
    check_flags(flags)
    keep_compiled()

    # 2. The devices.
    shape = config.decode.mesh
    one_row = config.decode.batch_size == 1 and not config.decode.concurrency
    if one_row and (shape.data, shape.tensor) == (1, 1) and (note := use_one_thread(config.target.path)):
        print(note)
    if (shape.data, shape.tensor) != (1, 1):
        distributed.initialize(flags.distributed, preemptible=False)
    mesh = decode_mesh(shape.data, shape.tensor, config.decode.batch_size)

    # 3. The settings.
    path = None if config.decode.compare else config.drafter.path
    settings = decode_settings(config.decode, head_to_decode(config, path), config.data.train)
    use_exact_matmuls(settings.dtype)
    made_up = functools.partial(drafter_config_of, config)
    loader = Loader(config.target.path, settings, mesh, made_up, flags.head, config.target.quantize)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), memory_refused(settings):
        if not flags.output:
            at_terminal(flags, loader)
            return

        # 4. The output: a finished one is shown. Every process looks, so that each refuses what it finds; process 0
        # may be the only one to see the files.
        output, source = Path(flags.output).expanduser(), prompt_source(flags)
        folders = check_output(flags)
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
        info = run_info(flags, settings, source, loaded.identity)
        prompts = prepare_prompts(rows, codec)
        fitting = functools.partial(prompts_with_room, codec=codec, skip_bad=config.data.skip_bad_rows)

        # 6. Drafters, decoding and the report.
        if folders:
            drafters = load_compared(flags, folders, loader, loaded, info)
            prompts = fitting([new_generator(one.models, one.settings) for one in drafters.values()], prompts)
            console_comparison(compare_drafters(loaded, drafters, prompts, info, output))
        else:
            models = loader.models(loaded, config.drafter.path, settings.modes)
            drafter = models.drafter and models.drafter.config
            if drafter:
                settings = fit_to_drafter(settings, drafter)
            prompts = fitting([new_generator(models, settings)], prompts)
            info = info.loaded(settings, loaded, prompts, models)
            report = decode_prompts(models, loaded, prompts, info, output)
            if distributed.is_primary():
                console_table(report)
        say(f"written to {output}")


def head_to_decode(config, path: str | None) -> str:
    """The head by which open decode.modes are chosen: of the drafter at `path`, else the recipe's."""
    return stored_head(path) if path and config.decode.modes is None else config.drafter.head


@contextlib.contextmanager
def memory_refused(settings: DecodeSettings):
    """Turns a device's lack of memory into a message about the recipe's sizes; other errors pass unchanged."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        largest = max(settings.concurrency, default=0)
        rows = f"decode.batch_size {settings.batch_size}"
        if largest > settings.batch_size:
            rows = f"{largest} rows, the most of decode.concurrency,"
        raise DominoError(
            f"the device has no memory for {rows} with decode.cache_length {settings.cache_length}"
            f" ({first_line(error, with_class=False)}); lower one of them."
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


def check_output(flags: cli.Flags) -> dict[str, str]:
    """Refuses an --output that cannot be written; returns the drafters of a comparison, folder by name."""
    compared = tuple(flags.config.decode.compare)
    if is_remote(flags.output):
        raise DominoError(
            f"--output={flags.output} is in a bucket, whose files cannot be appended to; name a local folder, and copy"
            " it when it is finished."
        )
    if compared and jax.process_count() > 1:
        raise DominoError(
            f"decode.compare writes from one process, but there are {jax.process_count()}; compare in one, or decode"
            " with one drafter at a time."
        )
    folders = dict(zip(drafter_names(compared), compared, strict=True))
    refuse_file(epath.Path(flags.output).expanduser())
    return folders


def show_finished(flags: cli.Flags, settings: DecodeSettings, output: Path, source: PromptSource) -> bool:
    """Shows the report that `output` already holds, if any. A finished run of something else is refused."""
    name = COMPARISON if flags.config.decode.compare else REPORT
    finished = read_report(output, name)
    if finished is None:
        return False
    path = flags.config.target.path
    _, source = read_rows(source, flags.config, hf.load_tokenizer(hf.resolve_folder(path)))
    info = run_info(flags, settings, source, target_identity(path))
    refuse_other_run(output, "a finished decoding", finished, info.origin())
    print(f"{output} holds a finished decoding; this is its report. Choose another --output to decode again.")
    if name == REPORT:
        console_table(finished)
    else:
        console_comparison(finished)
    return True


def load_compared(
    flags: cli.Flags, folders: dict[str, str], loader: Loader, loaded: LoadedTarget, info: RunInfo
) -> dict[str, ComparedDrafter]:
    """Several drafters by name; a mode that needs a head is left out for drafters without one.

    Modes that are left open are each drafter's own.
    """
    drafters = {}
    for name, path in folders.items():
        models = loader.models(loaded, path, (DRAFT,))  # which all drafters have
        settings = info.requested
        if flags.config.decode.modes is None:
            settings = settings.change(modes=default_modes(models.drafter.config))
        settings = fit_to_drafter(settings, models.drafter.config, lambda note, name=name: say(f"{name}: {note}"))
        drafters[name] = ComparedDrafter(path, models, settings)
    return drafters


if __name__ == "__main__":
    cli.run(main, required=("config",), optional=("output", "prompts", "prompt", "interactive", "distributed"))
