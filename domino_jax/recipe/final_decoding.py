"""The decoding that a training run ends with: its prompts, checked before the first step, and its report."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
from etils import epath

from domino_jax.data.chat import TextCodec
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.prompts import Prompt
from domino_jax.decoding.settings import DecodeSettings, supported_modes
from domino_jax.evals.report import REPORT
from domino_jax.evals.run import decode_prompts
from domino_jax.evals.run_info import PromptSource, RunInfo
from domino_jax.method.drafters import CONFIGS, AnyDrafter
from domino_jax.method.pair import Pair
from domino_jax.models.sharding import replicated
from domino_jax.recipe.models import lower_to_drafter, needs_drafter
from domino_jax.recipe.open_keys import decode_settings
from domino_jax.recipe.prompt_rows import prepare_prompts, prompts_with_room, read_rows
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.remote import copy_folder
from domino_jax.weights.identity import drafter_identity
from domino_jax.weights.loading import LoadedTarget, load_models, load_target, use_exact_matmuls
from domino_jax.weights.target import Sharding


def final_settings(config, head: str) -> DecodeSettings:
    """The recipe's decode settings that a training run of a drafter with this head ends with."""
    requested = decode_settings(config.decode, head, config.data.train)
    modes = supported_modes(requested.modes, CONFIGS[head])
    return requested.change(concurrency=(), modes=modes)


def final_prompts(
    config, loaded: LoadedTarget, models: Pair, settings: DecodeSettings
) -> tuple[list[Prompt], PromptSource]:
    """The prompts of `decode_trained`, and where they come from; others are refused together, or left out."""
    codec, generator = TextCodec(loaded.tokenizer, settings.thinking), new_generator(models, settings)
    source = PromptSource(config.eval.prompts, limit=config.decode.num_prompts)
    rows, source = read_rows(source, config, loaded.tokenizer)
    return prompts_with_room(generator, prepare_prompts(rows, codec), codec, config.data.skip_bad_rows), source


def check_final(config, loaded: LoadedTarget, drafter: AnyDrafter) -> list[tuple[int, ...]]:
    """The ids of the prompts of `decode_trained`; those it could not use are refused before hours of training."""
    if not config.eval.final or jax.process_count() > 1:
        return []
    settings = lower_to_drafter(final_settings(config, drafter.config.head), drafter.config)
    models = Pair(loaded.model, loaded.params, drafter if needs_drafter(settings.modes) else None)
    return [prompt.token_ids for prompt in final_prompts(config, loaded, models, settings)[0]]


def decode_trained(config, place: Sharding, identity: Mapping[str, Any], workdir: epath.Path) -> dict[str, Any]:
    """The final decoding of a training run, its exported drafter on the recipe's held-out prompts; returns the report.

    place: where the target's weights go.  identity: the target_identity.
    """
    requested, output = final_settings(config, config.drafter.head), workdir / "report"
    use_exact_matmuls(requested.dtype)
    path, quantize = config.target.path, config.target.quantize
    target = load_target(path, requested.dtype, place, quantize)
    mesh = jax.sharding.get_mesh()
    export = os.fspath(workdir / "export") if needs_drafter(requested.modes) else None
    models = load_models(target, export, None if mesh.empty else replicated(mesh), requested.drafting)
    settings = lower_to_drafter(requested, models.drafter.config) if export else requested
    prompts, source = final_prompts(config, target, models, settings)
    drafted_with = export and {"path": export, **drafter_identity(export)}
    info = RunInfo(requested, {"path": path, "quantize": quantize, **identity}, drafted_with, source)
    # Files in a bucket can be neither appended to nor cut: decoded here, and copied when they are complete.
    with tempfile.TemporaryDirectory(prefix="domino-decode-") if is_remote(output) else nullcontext(output) as folder:
        # A decoding of other weights there is of no use: the training has gone on since.
        report = decode_prompts(target, models, settings, prompts, info, Path(folder), restart=True)
        if is_remote(output):
            copy_folder(Path(folder), output, REPORT)
    return report
