"""Modes and decode settings as plain values; method/settings.py has the settings of sampling and drafting.

A field that is made by `key` is a key of the recipe's decode section, with its default and range here. Nothing here
imports jax, so that a recipe is checked before jax starts.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from domino_jax.method.settings import DraftSettings, Problem, SamplingParams, first_problem
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.keys import key

if TYPE_CHECKING:
    from domino_jax.method.config import DrafterConfig
    from domino_jax.method.head import HeadConfig

    Drafter = HeadConfig | type[HeadConfig]  # a config or its class

BASELINE, BACKBONE, DRAFT, DOMINO, TREE = MODES = ("autoregressive", "backbone", "draft", "domino", "tree")
DTYPES = ("float32", "bfloat16")  # that models run in


# ---------------------------------------------------------------------------------------------------- modes


def refused_mode(mode: str, drafter: "Drafter") -> str | None:
    """Why a drafter does not have a mode, and what to use; None where it has it."""
    head = drafter.head
    if mode == BACKBONE and not drafter.has_backbone:
        return f"mode {BACKBONE!r} drafts with the backbone of a block drafter, and {head} has none; use mode {DRAFT!r}"
    if mode == TREE and not drafter.has_backbone:
        return f"mode {TREE!r} needs a drafter that scores paths, and {head} drafts chains alone; use mode {DRAFT!r}"
    if mode == DOMINO and not drafter.has_head:
        return f"mode {DOMINO!r} needs a head on a backbone, and this drafter is {drafter.title}; use mode {DRAFT!r}"
    return None


def supported_modes(modes: Sequence[str], drafter: "Drafter") -> tuple[str, ...]:
    return tuple(mode for mode in modes if refused_mode(mode, drafter) is None)


def default_modes(drafter: "Drafter") -> tuple[str, ...]:
    """The modes where none are named: plain decoding, the drafter's own chain and, if it has a head on a backbone, the
    backbone alone."""
    if not drafter.has_head:
        return (BASELINE, DRAFT)
    return (BASELINE, BACKBONE, DOMINO if drafter.head == DOMINO else DRAFT)


def canonical_mode(mode: str) -> str:
    """`draft` for its synonym `domino`."""
    return DRAFT if mode == DOMINO else mode


# -------------------------------------------------------------------------------------------------- decoding


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """How texts are decoded.

    sampling, seed: of requests that set none.
    drafting: how to draft; the mode decides whether with the head and whether a tree.
    smallest_cache: slots of the caches of short texts. They grow by doubling, to cache_length at most. Fewer slots cost
        less to read; each size is a separate program for every mode.
    widths: numbers of drafts among which an adaptive width chooses; 0 is a plain step.
    """

    # Those to decode in; a caller that names the mode in each call leaves them empty. Absent in a recipe: plain
    # decoding, the drafter's own chain, and of a backbone with a head the backbone alone.
    modes: tuple[str, ...] = key((), recipe=tuple, of=str, choices=MODES)
    max_new_tokens: int = key(2048, least=1)  # the most that an answer may have
    # The most slots that the key/value caches may have. They follow the text; a prompt that needs more is refused.
    cache_length: int = key(4096, least=1)
    batch_size: int = key(1, least=1)  # requests decoded together; a row that finishes makes room for the next prompt
    sampling: SamplingParams = SamplingParams()
    seed: int = key(0, least=0)
    drafting: DraftSettings = DraftSettings()
    dtype: str = key("bfloat16", choices=DTYPES)  # of the weights and of all computation
    # near_tie: texts equal but for near ties, each of them checked. fixed_shape: plain decoding goes through the same
    # wide pass, so texts are equal without exception, in bfloat16 too, and the yardstick pays for the width.
    parity: str = key("near_tie", choices=("near_tie", "fixed_shape"))
    # fixed: every round verifies num_drafts. adaptive: each dispatch chooses among `widths` and these, by what was
    # accepted and how long rounds took; in fixed shape it is fixed. serve, regenerate and decode --interactive are
    # adaptive unless the command line sets this key.
    width: str = key("fixed", choices=("fixed", "adaptive"))
    thinking: bool = key(False)  # for the chat template, of prompts and of training rows
    concurrency: tuple[int, ...] = key((), of=int, least=1)  # also decode at these batch sizes: (1, 2, 4, 8, 16, 32)
    smallest_cache: int = 256
    widths: tuple[int, ...] = (0, 4, 8, 16)

    def change(self, **values: Any) -> "DecodeSettings":
        """The settings with other values. Names are all fields, also of sampling and drafting.

        Raises:
            TypeError: an unknown name.
        """
        for part in ("sampling", "drafting"):
            fields = values.pop(part, getattr(self, part))
            names = vars(fields).keys() & values.keys()
            values[part] = dataclasses.replace(fields, **{name: values.pop(name) for name in names})
        return dataclasses.replace(self, **values)

    @property
    def fixed_shape(self) -> bool:
        return self.parity == "fixed_shape"

    @property
    def adaptive(self) -> bool:
        """Whether dispatches choose their width."""
        return self.width == "adaptive" and not self.fixed_shape

    def drafting_of(self, mode: str, config: "DrafterConfig", drafts: int | None = None) -> DraftSettings:
        """How rounds of a mode draft: as the settings say when `drafts` is None. A tree has all of its drafts or 0."""
        tree = self.drafting.tree if mode == TREE and drafts != 0 else None
        use_head = config.has_head and mode != BACKBONE
        drafting = dataclasses.replace(self.drafting, use_head=use_head, tree=tree)
        return drafting if drafts is None or tree else dataclasses.replace(drafting, num_drafts=drafts)

    def round_widths(self, config: "DrafterConfig") -> dict[str, int]:
        """For each mode that drafts, the most tokens of a round; modes that the drafter does not have are left out."""
        modes = [mode for mode in supported_modes(self.modes, config) if mode != BASELINE]
        return {mode: self.drafting_of(mode, config).width(config) + 1 for mode in modes}

    def block_rows(self, drafter: "DrafterConfig | None") -> int:
        """Cache rows that a round of any mode writes after the committed length."""
        return self.drafting.block_rows(drafter) if drafter else 1

    def problem(self) -> Problem | None:
        """The first value, or pair of values, that no models can be decoded with; None if all are fine."""
        tree, new = self.drafting.tree, self.max_new_tokens
        nodes = tree.nodes if tree else 0
        held = f"max_new_tokens {new}" + (f" and the {nodes} nodes of a tree" if tree else "")
        fixed = "it gives plain decoding the width of a draft, and none of modes drafts; add one that does"
        chains = (
            "it is a promise for chains, because the siblings of a tree change the order of its sums; set it to"
            " near_tie, or decode without a tree"
        )
        drafts = not self.modes or set(self.modes) - {BASELINE}
        problem = first_problem(
            self,
            ("modes", len(set(self.modes)) == len(self.modes), "name each mode once"),
            ("cache_length", self.cache_length > new + nodes, f"it holds the prompt, {held}; raise it, or lower these"),
            ("parity", drafts or not self.fixed_shape, fixed),
            ("parity", not (tree and self.fixed_shape), chains),
        )
        return problem or self.sampling.problem() or self.drafting.problem()

    def check(self, vocab: int, drafter: "DrafterConfig | None") -> None:
        """Raises DominoError for settings that do not fit a vocabulary of `vocab` tokens and this drafter."""
        drafting, problems = self.drafting, [self.problem()]
        if self.fixed_shape and not drafter:
            problems.append(Problem("parity", "fixed_shape", "it needs a drafter, whose width plain decoding runs in"))
        if drafter:
            problems += [drafting.drafter_problem(drafter), drafting.vocabulary_problem(drafter)]
            if drafting.tree and drafting.tree.candidates > vocab:
                change = f"but the vocabulary has {vocab} tokens; lower it"
                problems.append(Problem("tree.candidates", drafting.tree.candidates, change))
        if problem := next(filter(None, problems), None):
            raise DominoError(f"decode.{problem}")

    def as_json(self) -> dict[str, Any]:
        """JSON values under the recipe's names, with sampling and drafting among the others; infinity is "inf"."""
        values = {**vars(self), **vars(self.sampling), **vars(self.drafting)}
        for name in ("sampling", "drafting", "smallest_cache", "use_head", "draft_vocab_rows"):
            del values[name]
        sharpness, tree = self.drafting.draft_sharpness, self.drafting.tree
        values["draft_sharpness"] = "inf" if math.isinf(sharpness) else sharpness
        values["tree"] = tree and dataclasses.asdict(tree)
        return json.loads(json.dumps(values))  # tuples become lists
