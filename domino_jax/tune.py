"""Tune the draft's constant c for one temperature and store it with the drafter.

    python -m domino_jax.tune --config=configs/tiny.py --config.decode.temperature=1.0

At temperature > 0 a draft is argmax(c·log q + g): with a large c the greedy draft, with c = 1 coupled with the target's
own noise (DESIGN §4). Which is best depends on how well q fits p, so it is measured: held-out prompts are decoded with
the greedy draft, with several c, and with a draft sampled apart from the target. The text is the same each time; τ is
not. The best c goes into <drafter>/decoding.json, where `decode` and `load` find it.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import rich.console
import rich.table

from domino_jax import cli, hf
from domino_jax import config as recipes
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.generate import Generator
from domino_jax.decoding.measure import tau_pooled
from domino_jax.decoding.models import Models
from domino_jax.decoding.propose import DraftSettings
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.errors import DataError, DominoError
from domino_jax.loading import load_models, load_target
from domino_jax.progress import Progress
from domino_jax.report import write_text

STORED = "decoding.json"
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)


@dataclasses.dataclass(frozen=True)
class Tried:
    """One way to draft and the acceptance length it had; own_noise: sampled apart from the target's choice."""

    scale: float
    own_noise: bool
    tau: float

    def name(self) -> str:
        if self.own_noise:
            return "sampled apart"
        return "greedy" if math.isinf(self.scale) else f"coupled, c = {self.scale:g}"


def main(flags: cli.Flags) -> None:
    config = flags.config
    recipes.check(config, "decode")
    decode = config.decode
    sampling = SamplingParams(decode.temperature, decode.top_k, decode.top_p, decode.min_p)
    if sampling.greedy:
        raise DominoError(
            "config.decode.temperature is 0: a greedy choice has no noise to share; name the temperature to tune for,"
            " as --config.decode.temperature=1.0."
        )
    source = flags.prompts or decode.prompts or config.eval.prompts
    if not source:
        raise DominoError("there are no prompts: give --prompts=FILE.jsonl or set config.decode.prompts.")
    mode = "domino" if "domino" in decode.modes else "backbone"
    loaded = load_target(config.target.path, decode.dtype)
    models = load_models(loaded, config.drafter.path, (mode,), block_size=decode.block_size)
    rows = read_prompts(source, decode.num_prompts or None)
    prompts = [encode_prompt(loaded.tokenizer, row, decode.thinking, f"prompt {row['id']}") for row in rows]
    settings = {
        "stop_ids": (*(() if decode.ignore_eos else loaded.stop_ids), *decode.stop_ids),
        "cache_slots": decode.cache_length,
        "max_new_tokens": decode.max_new_tokens,
        "batch_size": decode.batch_size,
        "seed": decode.seed,
        "sampling": sampling,
    }
    tried = try_scales(models, prompts, mode, decode.num_drafts or None, settings)
    best = max((one for one in tried if not one.own_noise), key=lambda one: one.tau)
    show(tried, best, f"{len(prompts)} prompts, temperature {sampling.temperature:g}, {mode}, {decode.dtype}")
    folder = hf.resolve_folder(config.drafter.path)
    folder = folder / "export" if (folder / "export").is_dir() else folder
    store(folder, sampling, best, len(prompts))
    print(f"stored in {folder / STORED}: decode takes it where config.decode.draft_scale is left out.")


def try_scales(
    models: Models, prompts: Sequence[Sequence[int]], mode: str, num_drafts: int | None, settings: dict
) -> list[Tried]:
    """τ of every way to draft; the texts are the same each time but for near ties, which are told.

    settings: of the generator, but for how it drafts.
    """
    ways = [(math.inf, False), *((scale, False) for scale in SCALES), (1.0, True)]
    tried, texts = [], None
    with Progress("tune", total=len(ways)) as progress:
        for scale, own_noise in ways:
            drafting = DraftSettings(scale=scale, own_noise=own_noise, num_drafts=num_drafts)
            generator = Generator(models, drafting=drafting, **settings)
            answers = generator.generate(prompts, mode)
            tried.append(Tried(scale, own_noise, tau_pooled(answers)))
            texts = texts or [answer.token_ids for answer in answers]
            parted = sum(text != answer.token_ids for text, answer in zip(texts, answers, strict=True))
            progress.advance(
                1, f"{tried[-1].name()}: τ {tried[-1].tau:.2f}" + f", {parted} texts parted" * bool(parted)
            )
    return tried


def show(tried: Sequence[Tried], best: Tried, title: str) -> None:
    console = rich.console.Console()
    table = rich.table.Table()
    table.add_column("draft")
    table.add_column("τ pooled", justify="right")
    for one in tried:
        table.add_row(one.name() + (" (best)" if one is best else ""), f"{one.tau:.2f}")
    console.print(title, highlight=False)
    console.print(table)


# ------------------------------------------------------------------------------------------- stored with the drafter


def store(folder: Path, sampling: SamplingParams, best: Tried, prompts: int) -> None:
    """Writes the constant beside what is stored for other sampling settings."""
    kept = [row for row in _stored_rows(folder) if not _same(row, sampling)]
    scale = "inf" if math.isinf(best.scale) else best.scale
    row = {**dataclasses.asdict(sampling), "draft_scale": scale, "tau": best.tau, "prompts": prompts}
    try:
        write_text(folder / STORED, json.dumps({"tuned": [*kept, row]}, indent=2) + "\n")
    except OSError as error:
        raise DominoError(
            f"{folder} cannot be written ({error.strerror}); copy the drafter to a folder of yours, or set"
            f" --config.decode.draft_scale={scale} by hand."
        ) from error


def stored_scale(drafter_path: str | None, sampling: SamplingParams) -> float:
    """c as tuned for these sampling settings with this drafter; inf, the greedy draft, where nothing is stored."""
    if not drafter_path or sampling.greedy:
        return math.inf
    folder = hf.resolve_folder(drafter_path)
    folder = folder / "export" if (folder / "export").is_dir() else folder
    found = [row for row in _stored_rows(folder) if _same(row, sampling)]
    return float(found[0]["draft_scale"]) if found else math.inf


def _same(row: dict, sampling: SamplingParams) -> bool:
    return all(row[name] == value for name, value in dataclasses.asdict(sampling).items())


def _stored_rows(folder: Path) -> list[dict]:
    raw = hf.read_json(folder, STORED, required=False)
    rows = raw["tuned"] if "tuned" in raw else []
    names = {"draft_scale", *dataclasses.asdict(SamplingParams())}
    fine = isinstance(rows, list) and all(isinstance(row, dict) and names <= set(row) for row in rows)
    scales = [row["draft_scale"] for row in rows] if fine else []
    if not fine or not all(scale == "inf" or (isinstance(scale, int | float) and scale > 0) for scale in scales):
        raise DataError(f"{folder}/{STORED} is damaged; remove it, or tune again with python -m domino_jax.tune.")
    return rows


if __name__ == "__main__":
    cli.run(main, required=("config",), optional=("prompts",))
