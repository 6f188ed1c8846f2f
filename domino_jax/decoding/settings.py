"""How to decode, as plain values, and the generator that they describe."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.decoding.generate import BASELINE, TREE, Generator, Request
from domino_jax.decoding.propose import DraftSettings, TreeSettings
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.decoding.sampling_ranges import LARGEST
from domino_jax.decoding.tuned_constants import CHAINS, TREES, stored
from domino_jax.drafters.config import DrafterConfig
from domino_jax.drafters.pair import Models
from domino_jax.runtime.errors import DataError

LISTS = ("modes", "stop_ids", "concurrency")
# What a prompt row may say of itself; a sampling value that it leaves out is off.
SAMPLING_VALUES = dataclasses.asdict(SamplingParams())
ROW_VALUES = ("seed", "max_new_tokens", *SAMPLING_VALUES)


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """How to decode: the recipe's decode section, as plain values. draft_scale None: the drafter's own, else inf."""

    modes: tuple[str, ...]
    max_new_tokens: int
    cache_length: int
    batch_size: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    draft_scale: float | None = None
    draft_noise: str = "shared"
    block_size: int = 0
    num_drafts: int = 0
    parity: str = "near_tie"
    gate_table: bool = False
    chunk_rounds: int = 4
    simulate_tau: float = 0.0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    thinking: bool = False
    dtype: str = "float32"
    concurrency: tuple[int, ...] = ()
    cores: int = 0
    tree: TreeSettings | None = None

    def round_widths(self, config: DrafterConfig) -> dict[str, int]:
        """By mode that drafts, tokens that a round can emit at most; a mode that the drafter has not is left out."""
        chain = DraftSettings(num_drafts=self.num_drafts or None)
        drafting = [mode for mode in self.modes if mode != BASELINE and (config.has_head or mode != "domino")]
        shapes = {mode: dataclasses.replace(chain, tree=self.tree if mode == TREE else None) for mode in drafting}
        return {mode: shape.width(config) + 1 for mode, shape in shapes.items()}

    def as_json(self) -> dict[str, Any]:
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        tree = self.tree and dataclasses.asdict(self.tree)
        values["tree"] = tree and {**tree, "draft_scale": _json_scale(self.tree.draft_scale)}
        return {**values, "draft_scale": _json_scale(self.draft_scale)}


def _json_scale(scale: float | None) -> float | str | None:
    return str(scale) if scale is not None and math.isinf(scale) else scale


def tree_from_json(values: Mapping[str, Any]) -> TreeSettings:
    """The tree of `DecodeSettings.as_json`."""
    scale = values.get("draft_scale")
    return TreeSettings(**{**values, "draft_scale": None if scale is None else float(scale)})


def decode_settings(decode) -> DecodeSettings:
    """The recipe's decode section as plain values."""
    names = {field.name for field in dataclasses.fields(DecodeSettings)} - {"tree"}
    values = {name: tuple(decode[name]) if name in LISTS else decode[name] for name in names}
    # Without the mode nothing has to fit a tree: its rows count in how much cache a prompt needs.
    return DecodeSettings(**values, tree=TreeSettings(**decode.tree) if "tree" in decode.modes else None)


def with_stored_constants(settings: DecodeSettings, drafter_path: str | None) -> DecodeSettings:
    """draft_scale of chains and trees as the recipe says, else as `domino_jax.tune` stored them with the drafter."""
    sampling = SamplingParams(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    if settings.draft_scale is None:
        settings = dataclasses.replace(settings, draft_scale=stored(drafter_path, CHAINS, sampling).draft_scale)
    if settings.tree and settings.tree.draft_scale is None:
        best = stored(drafter_path, TREES, sampling)
        settings = dataclasses.replace(settings, tree=dataclasses.replace(settings.tree, **dataclasses.asdict(best)))
    return settings


def request_of(row: Mapping[str, Any], noise: int) -> int | Request:
    """What a prompt row asks for itself: seed, max_new_tokens and sampling values under their names.

    A row with a seed has the noise of a run with that seed whose first prompt it is, wherever it stands.

    Raises:
        DataError: a value of the wrong kind or out of range.
    """
    given = {name: row[name] for name in ROW_VALUES if name in row}
    if not given:
        return noise
    where = f"prompt {row['id']}"
    for name, value in given.items():
        kinds = (int, float) if name in ("temperature", "top_p", "min_p") else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise DataError(f"{where} has {name} {value!r}, expected a number.")
        if name != "seed" and LARGEST < abs(value) < math.inf:
            raise DataError(f"{where} has {name} {str(value)[:20]}…, which no device holds; give {LARGEST} or less.")
    sampling = None
    if set(given) - {"seed", "max_new_tokens"}:
        sampling = SamplingParams(*(given.get(name, default) for name, default in SAMPLING_VALUES.items()))
        problem = sampling.problem()
        if problem:
            raise DataError(f"{where}: {problem}")
    seed = given.get("seed")
    if seed is not None and not 0 <= seed <= LARGEST:
        raise DataError(f"{where} has seed {seed}; give a number from 0 to {LARGEST}.")
    return Request(noise if seed is None else 0, seed, given.get("max_new_tokens"), sampling)


def new_generator(
    models: Models, target_stop_ids: Sequence[int], settings: DecodeSettings, batch_size: int | None = None
) -> Generator:
    """ignore_eos drops the stop ids of the target's folder; those of the recipe were asked for and stay.

    So are those of the folder dropped that lie behind the vocabulary: no token has them.

    batch_size: rows decoded together, those of the settings when None.
    """
    vocab = models.target.config.vocab_size
    own = () if settings.ignore_eos else tuple(token for token in target_stop_ids if token < vocab)
    return Generator(
        models,
        stop_ids=(*own, *settings.stop_ids),
        cache_slots=settings.cache_length,
        max_new_tokens=settings.max_new_tokens,
        batch_size=batch_size or settings.batch_size,
        sampling=SamplingParams(settings.temperature, settings.top_k, settings.top_p, settings.min_p),
        seed=settings.seed,
        drafting=DraftSettings(
            scale=math.inf if settings.draft_scale is None else settings.draft_scale,
            own_noise=settings.draft_noise == "own",
            num_drafts=settings.num_drafts or None,
            tree=settings.tree,
        ),
        fixed_shape=settings.parity == "fixed_shape",
        simulated_tau=settings.simulate_tau or None,
    )
