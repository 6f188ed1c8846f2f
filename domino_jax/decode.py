"""Decode prompts in several modes side by side and report what that measured.

    python -m domino_jax.decode --config=configs/tiny.py --output=/tmp/decoded
    python -m domino_jax.decode --config=configs/tiny.py --prompt="Repeat the word domino." --output=/tmp/decoded

--output is a folder: generations.jsonl (written as batches finish), report.json, report.md, plots/. A folder with a
report is finished and only shown. One without was interrupted; its generations.jsonl is replaced, since figures of two
halves, measured at different times, would not belong together.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from domino_jax import cli
from domino_jax import config as recipes
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.data.tiny_checks import check_answer
from domino_jax.decoding.generate import Clock, Generation, Generator
from domino_jax.decoding.measure import ModeRun, decode_modes, divergences, round_split, straight_step_seconds
from domino_jax.decoding.models import Models
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.drafter.model import Drafter, DrafterConfig
from domino_jax.errors import DominoError
from domino_jax.export import EXPORT_DTYPE
from domino_jax.loading import LoadedTarget, cast_target, check_head, load_models, load_target, needs_drafter
from domino_jax.progress import Progress
from domino_jax.report import BASELINE, build_report, console_table, read_report, write_report

GENERATIONS = "generations.jsonl"


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """How to decode: the recipe's decode section, as plain values."""

    modes: tuple[str, ...]
    max_new_tokens: int
    cache_length: int
    batch_size: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    draft_scale: float = 1.0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    thinking: bool = False
    dtype: str = "float32"

    def as_json(self) -> dict[str, Any]:
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return {**values, "draft_scale": str(self.draft_scale) if math.isinf(self.draft_scale) else self.draft_scale}


def main(flags: cli.Flags) -> None:
    # ---------------------------------------------------------------- recipe
    config = flags.config
    recipes.check(config, "decode")
    if flags.prompts and flags.prompt:
        raise DominoError("--prompts and --prompt are both given; decode the rows of a file or one text, not both.")
    settings = decode_settings(config.decode)
    output = Path(flags.output).expanduser()
    source = "--prompt" if flags.prompt else flags.prompts or config.decode.prompts
    if not source:
        raise DominoError(
            "there are no prompts: give --prompts=FILE.jsonl or --prompt=TEXT, or set config.decode.prompts."
        )
    named = {
        "settings": settings.as_json(),
        "target": {"path": recipes.portable(config.target.path)},
        "drafter": {"path": recipes.portable(config.drafter.path or "")} if needs_drafter(settings.modes) else None,
        "prompts": {"source": recipes.portable(source), "text": flags.prompt, "limit": config.decode.num_prompts},
    }
    finished = read_report(output)
    if finished is not None:
        refuse_other_run(output, finished, named)
        print(f"{output} holds a finished decoding; this is its report. Choose another --output to decode again.")
        console_table(finished)
        return

    # ---------------------------------------------------------------- models and prompts
    rows = None if flags.prompt else read_prompts(source, config.decode.num_prompts or None)
    loaded = load_target(config.target.path, settings.dtype)
    models = load_models(loaded, config.drafter.path, settings.modes)
    rows = rows or [prompt_row(flags.prompt, loaded.tokenizer)]

    # ---------------------------------------------------------------- decoding
    report = decode_rows(models, loaded, rows, settings, output, named)
    if flags.prompt:
        print(read_text(output, settings.modes[-1]))
    console_table(report)
    print(f"written to {output}")


def decode_with(
    config, loaded: LoadedTarget, drafter_config: DrafterConfig, drafter_params: dict, output: Path
) -> dict[str, Any]:
    """The final decoding of a training run: its drafter, rounded as its export is, on the recipe's held-out prompts."""
    settings = decode_settings(config.decode)
    if not drafter_config.has_head:
        settings = dataclasses.replace(settings, modes=tuple(mode for mode in settings.modes if mode != "domino"))
    source = config.decode.prompts or config.eval.prompts
    rows = read_prompts(source, config.decode.num_prompts or None)
    target = cast_target(loaded, settings.dtype)
    models = Models(target.model, target.params)
    if needs_drafter(settings.modes):
        drafter = Drafter(drafter_config, np.dtype(settings.dtype))
        rounded = jax.tree.map(lambda leaf: leaf.astype(EXPORT_DTYPE).astype(settings.dtype), drafter_params)
        models = Models(target.model, target.params, drafter, rounded)
    named = {
        "settings": settings.as_json(),
        "target": {"path": recipes.portable(config.target.path)},
        "drafter": {"path": str(output.parent / "export")} if models.drafter else None,
        "prompts": {"source": recipes.portable(source), "text": None, "limit": config.decode.num_prompts},
    }
    return decode_rows(models, target, rows, settings, output, named)


def decode_settings(decode) -> DecodeSettings:
    """The recipe's decode section as plain values."""
    return DecodeSettings(
        modes=tuple(decode.modes),
        max_new_tokens=decode.max_new_tokens,
        cache_length=decode.cache_length,
        batch_size=decode.batch_size,
        temperature=decode.temperature,
        top_k=decode.top_k,
        top_p=decode.top_p,
        min_p=decode.min_p,
        seed=decode.seed,
        draft_scale=decode.draft_scale,
        stop_ids=tuple(decode.stop_ids),
        ignore_eos=decode.ignore_eos,
        thinking=decode.thinking,
        dtype=decode.dtype,
    )


def refuse_other_run(output: Path, finished: Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """A finished folder answers only for what it was made with; something else asked of it is a mistake."""
    differing = []
    for part, wanted in named.items():
        there, wanted = finished[part] or {}, wanted or {}
        keys = [key for key in wanted if key in there] if there else list(wanted)
        differing += [
            f"  {part}.{key}: {there.get(key)!r} there, {wanted[key]!r} now"
            for key in keys
            if there.get(key) != wanted[key]
        ]
    if differing:
        more = [f"  and {len(differing) - 2} more"] * (len(differing) > 3)
        shown = [*differing[: 2 if more else 3], *more]
        raise DominoError(
            "\n".join([f"{output} holds a finished decoding of something else:", *shown, "Choose another --output."])
        )


def prompt_row(text: str, tokenizer: Any) -> dict[str, Any]:
    """--prompt as a row: a user's message for a model with a chat template, else the text as it is."""
    if tokenizer is not None and tokenizer.chat_template:
        return {"id": "prompt", "messages": [{"role": "user", "content": text}]}
    return {"id": "prompt", "prompt": text}


# ------------------------------------------------------------------------------------------------------ the run


def decode_rows(
    models: Models,
    target: LoadedTarget,
    rows: Sequence[Mapping[str, Any]],
    settings: DecodeSettings,
    output: Path,
    named: Mapping[str, Any],
) -> dict[str, Any]:
    """Decodes prompt rows (each with an "id") in every mode into the folder `output`, and returns the report.

    Args:
        target: for its tokenizer and stop ids; the weights that run are those of `models`.
        named: what the report says about where things came from: "settings", "target", "drafter", "prompts".
    """
    if needs_drafter(settings.modes):
        check_head(models.drafter is not None and models.drafter.config.has_head, settings.modes)
    generator = new_generator(models, target.stop_ids, settings)
    prompts = []
    for row in rows:
        where = f"prompt {row['id']}"
        prompts.append(encode_prompt(target.tokenizer, row, settings.thinking, where))
        generator.check_prompt(prompts[-1], where)
    runs = run_modes(generator, prompts, rows, settings.modes, target.tokenizer, output)
    found = {}
    if BASELINE in runs:
        others = [mode for mode in runs if mode != BASELINE]
        found = {mode: divergences(generator, prompts, runs[BASELINE], runs[mode]) for mode in others}
    generator.clock = Clock()  # what follows belongs to no mode's time
    batch = prompts[: settings.batch_size]
    state = generator.start(batch, list(range(len(batch))))
    report = build_report(
        runs,
        batch_size=settings.batch_size,
        divergences=found,
        split={mode: round_split(generator, state, mode) for mode in runs if mode != BASELINE},
        straight_step=straight_step_seconds(generator, state),
        answers_right=count_right(runs, rows, target.tokenizer),
        facts=describe(models, target, rows, settings, named),
    )
    write_report(output, report)
    return report


def new_generator(models: Models, target_stop_ids: Sequence[int], settings: DecodeSettings) -> Generator:
    """ignore_eos drops the stop ids of the target's folder; those of the recipe were asked for and stay."""
    return Generator(
        models,
        stop_ids=(*(() if settings.ignore_eos else target_stop_ids), *settings.stop_ids),
        cache_slots=settings.cache_length,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        sampling=SamplingParams(settings.temperature, settings.top_k, settings.top_p, settings.min_p),
        seed=settings.seed,
        draft_scale=settings.draft_scale,
    )


def run_modes(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[Mapping[str, Any]],
    modes: Sequence[str],
    tokenizer: Any,
    output: Path,
) -> dict[str, ModeRun]:
    """All modes on all prompts; every answer is in generations.jsonl as soon as its batch is done."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / GENERATIONS).open("w", encoding="utf-8")
    except OSError as error:
        raise DominoError(f"--output={output} cannot be written: {error.strerror}.") from error
    with file, Progress("decode", total=len(prompts) * len(modes)) as progress:

        def keep(mode: str, start: int, answers: list[Generation]) -> None:
            lines = [generation_row(rows[start + index], mode, one, tokenizer) for index, one in enumerate(answers)]
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            file.flush()
            progress.advance(len(answers), mode)

        return decode_modes(generator, prompts, modes, keep)


def generation_row(row: Mapping[str, Any], mode: str, answer: Generation, tokenizer: Any) -> dict[str, Any]:
    return {
        "id": row["id"],
        "mode": mode,
        "token_ids": answer.token_ids,
        "text": answer_text(tokenizer, answer.token_ids),
        "accept_lengths": answer.accept_lengths,
        "finish_reason": answer.finish_reason,
    }


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str | None:
    """The answer without special tokens, None without a tokenizer."""
    return None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=True)


def count_right(
    runs: Mapping[str, ModeRun], rows: Sequence[Mapping[str, Any]], tokenizer: Any
) -> dict[str, int] | None:
    """By mode, how many answers to rows with a checker are right; None when no row has one."""
    if tokenizer is None or not any(has_checker(row) for row in rows):
        return None
    return {
        mode: sum(
            has_checker(row) and check_answer(row, answer_text(tokenizer, answer.token_ids))
            for row, answer in zip(rows, run.generations, strict=True)
        )
        for mode, run in runs.items()
    }


def has_checker(row: Mapping[str, Any]) -> bool:
    return "answer_check" in row and "kind" in row


def describe(
    models: Models,
    target: LoadedTarget,
    rows: Sequence[Mapping[str, Any]],
    settings: DecodeSettings,
    named: Mapping[str, Any],
) -> dict[str, Any]:
    """What the report says about the run besides its figures."""
    template = target.tokenizer.chat_template if target.tokenizer is not None else None
    checked = sum(has_checker(row) for row in rows) if target.tokenizer is not None else 0
    drafter = None
    width = 1
    if models.drafter:
        choices = models.drafter.config
        width = choices.num_drafts + 1
        drafter = {
            **named["drafter"],
            "projector": choices.projector,
            "block_size": choices.block_size,
            "shift_label": choices.shift_label,
            "layers": choices.num_hidden_layers,
            "target_layer_ids": list(choices.target_layer_ids),
        }
    return {
        **named,
        "prompts": {**named["prompts"], "count": len(rows), "checked": checked},
        "drafter": drafter,
        "dtype": settings.dtype,
        "thinking": settings.thinking,
        "template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
        "block_size": drafter["block_size"] if drafter else None,
        "verify_width": width,
    }


def read_text(output: Path, mode: str) -> str:
    """The text that `mode` gave to the first prompt, or its ids without a tokenizer."""
    lines = (output / GENERATIONS).read_text(encoding="utf-8").splitlines()
    row = next(row for row in map(json.loads, lines) if row["mode"] == mode)
    return row["text"] if row["text"] is not None else str(row["token_ids"])


if __name__ == "__main__":
    cli.run(main, required=("config", "output"), optional=("prompts", "prompt"))
