"""Decode prompts in several modes side by side and report speed, acceptance and equality.

    python -m domino_jax.decode --config=configs/tiny.py --output=/tmp/decoded
    python -m domino_jax.decode --config=configs/tiny.py --prompt="Laura has 46 plums. She buys 9. How many now?"
    python -m domino_jax.decode --config=configs/tiny.py --interactive
    python -m domino_jax.decode --config=configs/qwen3_8b.py --config.drafter.path=DIR --output=DIR \\
        --config.decode.tasks="('gsm8k','humaneval=HumanEval.jsonl')"

--output is a folder: generations.jsonl and progress.jsonl (written as groups of prompts finish), answers.jsonl,
report.json, report.html, plots/. The same command continues an interrupted run after its last complete group.

--prompt without --output, and --interactive, show the text as it is committed instead.

--dry_run prints what a step and rounds of some widths must read, from shapes alone (forecast/rounds.py).

config.decode.tasks decodes benchmark tasks instead of prompts (data/tasks.py), and config.decode.concurrency also
measures the throughput at several batch sizes. domino_jax.evaluate compares drafters.
"""

import contextlib
import io
import sys

import jax
import rich.console

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.api import Decoder
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.prefixes import Prefixes
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.decoding.terminal import chat, show
from domino_jax.evals.report import console_table, output_folder
from domino_jax.evals.run import decode_prompts
from domino_jax.evals.run_info import PromptSource, RunInfo
from domino_jax.forecast import rounds as forecast_rounds
from domino_jax.recipe import cli, rules
from domino_jax.recipe.builders import loader_of
from domino_jax.recipe.decode_flags import check_flags
from domino_jax.recipe.models import Loader, lower_to_drafter, needs_drafter
from domino_jax.recipe.open_keys import decode_settings, width_of
from domino_jax.recipe.prompt_rows import prepare_prompts, prompt_source, prompts_with_room, read_rows, report_limit
from domino_jax.runtime import distributed
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DominoError, first_line
from domino_jax.runtime.small_models import use_one_thread
from domino_jax.weights.drafter import stored_head
from domino_jax.weights.identity import drafter_identity, target_identity
from domino_jax.weights.loading import keep_compiled, use_exact_matmuls


def main(flags: cli.Flags) -> None:
    # 1. The recipe, and the flags beside it.
    config = flags.config
    rules.check(config, "decode_dry_run" if flags.dry_run else "decode", flags.set_keys, flags.given)
    if flags.dry_run:
        return forecast_rounds.main(flags)
    check_flags(flags)

    # 2. The processes, where they share a mesh; a small model on a CPU has one thread.
    shape = config.decode.mesh
    one_row = config.decode.batch_size == 1 and not config.decode.concurrency
    if one_row and (shape.data, shape.tensor) == (1, 1) and (note := use_one_thread(config.target.path)):
        print(note)
    if (shape.data, shape.tensor) != (1, 1):
        distributed.initialize(flags.distributed, preemptible=False)

    # 3. The settings, and the devices.
    keep_compiled()
    path, head = config.drafter.path, config.drafter.head
    if path and config.decode.modes is None:
        head = stored_head(path)  # on which the open modes depend
    settings = decode_settings(config.decode, head, config.data.train)
    use_exact_matmuls(settings.dtype)
    loader = loader_of(flags, settings)
    with loader.on_mesh(), memory_refused(settings):
        if not flags.output:
            return at_terminal(flags, loader)

        # 4. The output folder, target and prompts.
        output, source = output_folder(flags.output), prompt_source(flags)
        loaded = loader.target()
        codec = TextCodec(loaded.tokenizer, settings.thinking)
        rows, source = read_rows(source, config, loaded.tokenizer)
        report_limit(source, len(rows))
        prompts = prepare_prompts(rows, codec)

        # 5. The drafter, and the prompts that there is room for.
        info = run_info(flags, settings, source)
        models = loader.models(loaded, path, settings.modes)
        if models.drafter:
            settings = lower_to_drafter(settings, models.drafter.config)
        prompts = prompts_with_room(new_generator(models, settings), prompts, codec, config.data.skip_bad_rows)

        # 6. Decoding, and the report.
        report = decode_prompts(loaded, models, settings, prompts, info, output)
        if distributed.is_primary():
            console_table(report)
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


def run_info(flags: cli.Flags, settings: DecodeSettings, source: PromptSource) -> RunInfo:
    """The flags, the recipe and the identity of the models; settings: the requested ones."""
    config, drafter = flags.config, None
    if needs_drafter(settings.modes):
        path = config.drafter.path or ""
        drafter = {"path": path, **(drafter_identity(path) if path else {})}
    target = {"path": config.target.path, "quantize": config.target.quantize, **target_identity(config.target.path)}
    return RunInfo(settings, target, drafter, source)


if __name__ == "__main__":
    cli.run(
        main,
        required=("config",),
        optional=("output", "prompts", "prompt", "interactive", "distributed", "dry_run", "topology"),
    )
