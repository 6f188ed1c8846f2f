"""The decode section of a recipe as plain values, completed by a stored tuning.

Nothing here imports jax, so that a recipe is checked before jax starts.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from domino_jax.method.settings import (
    BASELINE,
    TREE,
    DraftSettings,
    GeneratorSettings,
    SamplingParams,
    TreeSettings,
    default_modes,
    supported_modes,
)

if TYPE_CHECKING:
    from domino_jax.method.config import DrafterConfig


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The fastest way to draft that `domino_jax.tune` found. mode: draft or tree, the faster one in the largest batch.

    num_drafts: of the fastest chain in the largest batch.
    tree: its fastest shape within the same block; None where no tree was measured.
    widths: pairs (rows, drafts) of the fastest chain by the rows of a batch, ascending; 0 drafts is a plain step.
    break_even: triples (rows, drafts, τ above which such rounds are faster than plain decoding) of the chains in this
        block, as they were measured; None where a step was too fast to time.
    head_candidates: of the setup that it was measured in.
    """

    mode: str
    block_size: int
    num_drafts: int
    draft_scale: float
    tree: TreeSettings | None
    widths: tuple[tuple[int, int], ...]
    break_even: tuple[tuple[int, int, float | None], ...] = dataclasses.field(default=(), compare=False)
    head_candidates: int = dataclasses.field(default=0, compare=False)

    @property
    def chain(self) -> DraftSettings:
        return DraftSettings(scale=self.draft_scale, widths=self.widths)


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """The recipe's decode section as plain values; configs/qwen3.py describes them and has the defaults.

    block_size, draft_scale, widths: from a stored tuning; without one 0, the drafter's own block, infinity, a greedy
        draft, and none, num_drafts for every batch.  break_even: of that tuning, for the report.
    tree: None without the mode.
    """

    modes: tuple[str, ...]
    max_new_tokens: int
    cache_length: int
    batch_size: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_drafts: int
    head_candidates: int
    head_rank: int
    confidence: float
    parity: str
    simulate_tau: float
    ignore_eos: bool
    thinking: bool
    dtype: str
    concurrency: tuple[int, ...]
    cores: int
    block_size: int = 0
    draft_scale: float = math.inf
    widths: tuple[tuple[int, int], ...] = ()
    break_even: tuple[tuple[int, int, float | None], ...] = ()
    tree: TreeSettings | None = None

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def drafting(self) -> DraftSettings:
        # In fixed shape all rounds have one width, that of plain steps.
        widths = () if self.parity == "fixed_shape" else self.widths
        return DraftSettings(
            scale=self.draft_scale,
            num_drafts=None if widths else self.num_drafts or None,
            tree=self.tree,
            head_candidates=self.head_candidates,
            confidence=self.confidence,
            widths=widths,
        )

    def generator(self, target_stop_ids: Sequence[int], batch_size: int | None = None) -> GeneratorSettings:
        """What a generator needs to know.

        Args:
            target_stop_ids: of the target's folder; ignore_eos drops them.
            batch_size: rows decoded together; the recipe's when None.
        """
        return GeneratorSettings(
            cache_slots=self.cache_length,
            max_new_tokens=self.max_new_tokens,
            batch_size=batch_size or self.batch_size,
            sampling=self.sampling,
            seed=self.seed,
            drafting=self.drafting,
            stop_ids=() if self.ignore_eos else tuple(target_stop_ids),
            fixed_shape=self.parity == "fixed_shape",
            simulated_tau=self.simulate_tau or None,
        )

    def draftings(self, config: "DrafterConfig") -> dict[str, DraftSettings]:
        """How each mode drafts; modes that the drafter does not have are left out."""
        modes = [mode for mode in supported_modes(self.modes, config.head) if mode != BASELINE]
        return {mode: dataclasses.replace(self.drafting, tree=self.tree if mode == TREE else None) for mode in modes}

    def round_widths(self, config: "DrafterConfig") -> dict[str, int]:
        """For each mode that drafts, the most tokens of a round."""
        return {mode: drafting.width(config) + 1 for mode, drafting in self.draftings(config).items()}

    def as_json(self) -> dict[str, Any]:
        """JSON values; infinity becomes "inf"."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        del values["break_even"]
        values["widths"] = [list(pair) for pair in self.widths]
        tree = self.tree and dataclasses.asdict(self.tree)
        values["tree"] = tree and {**tree, "draft_scale": json_scale(self.tree.draft_scale)}
        return {**values, "draft_scale": json_scale(self.draft_scale)}


def json_scale(scale: float | None) -> float | str | None:
    return str(scale) if scale is not None and math.isinf(scale) else scale


def decode_settings(decode, head: str, tuning: Tuning | None = None) -> DecodeSettings:
    """The recipe's decode section as plain values; what it leaves open comes from the tuning, or is the default.

    head: of the drafter, for modes that are left open.
    """
    tuned = {"block_size", "draft_scale", "widths", "break_even", "tree"}
    names = {field.name for field in dataclasses.fields(DecodeSettings)} - tuned
    values = {name: tuple(decode[name]) if isinstance(decode[name], list | tuple) else decode[name] for name in names}
    values["modes"] = modes = modes_of(decode, head)
    if tuning:
        values["draft_scale"] = tuning.draft_scale
        if not decode.num_drafts:
            values |= {name: getattr(tuning, name) for name in ("block_size", "num_drafts", "widths", "break_even")}
    # Without the mode a tree's rows must not count in how much cache a prompt needs.
    tree = tree_settings(decode.tree, tuning and tuning.tree) if TREE in modes else None
    return DecodeSettings(**values, tree=tree)


def modes_of(decode, head: str) -> tuple[str, ...]:
    """decode.modes, or where they are left open those of a drafter with this head."""
    return default_modes(head) if decode.modes is None else tuple(decode.modes)


def tree_settings(section, tuned: TreeSettings | None = None) -> TreeSettings:
    """The recipe's tree section, or the tuned shape if `nodes` is not set; the coupling is always the tuned one."""
    if tuned and section.nodes is None:
        return tuned
    tree = TreeSettings(**{name: value for name, value in section.items() if value is not None})
    return dataclasses.replace(tree, draft_scale=tuned.draft_scale, spread=tuned.spread) if tuned else tree
