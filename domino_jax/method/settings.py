"""Decoding settings as plain values: modes, sampling, drafts and trees, with the checks that refuse unusable values.

Nothing here imports jax, so that a recipe is checked before jax starts.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from domino_jax.method.names import DOMINO as DOMINO_HEAD
from domino_jax.method.names import EAGLE3, MARKOV, NONE, ROW_DRAFTERS
from domino_jax.runtime.errors import DominoError

if TYPE_CHECKING:
    from domino_jax.method.config import DrafterConfig

BASELINE, BACKBONE, DRAFT, DOMINO, TREE = MODES = ("autoregressive", "backbone", "draft", "domino", "tree")
PARITIES = ("near_tie", "fixed_shape")
LARGEST = 2**31 - 1  # the largest int32
DTYPES = ("float32", "bfloat16")  # that models run in


class Problem(NamedTuple):
    """A value that cannot be used, and what to change."""

    name: str
    value: Any
    change: str

    def __str__(self) -> str:
        return f"{self.name} is {self.value!r}{', ' if self.change.startswith('but ') else ': '}{self.change}."


# ---------------------------------------------------------------------------------------------------- modes


def refused_mode(mode: str, head: str) -> str | None:
    """Why a drafter with this head (method/names.py) does not have a mode, and what to use; None where it has it."""
    if mode == BACKBONE and head in ROW_DRAFTERS:
        return f"mode {BACKBONE!r} drafts with the backbone of a block drafter, and {head} has none; use mode {DRAFT!r}"
    if mode == TREE and head == EAGLE3:
        return f"mode {TREE!r} needs a drafter that scores paths, and {head} drafts chains alone; use mode {DRAFT!r}"
    if mode == DOMINO and head == NONE:
        return "mode 'domino' needs a drafter with a head, but this one is plain DFlash; use mode 'draft'"
    if mode == DOMINO and head in ROW_DRAFTERS:
        return f"mode 'domino' needs a drafter with a backbone and a head, but this one is {head}; use mode 'draft'"
    return None


def supported_modes(modes: Sequence[str], head: str) -> tuple[str, ...]:
    """The modes that a drafter with this head has."""
    return tuple(mode for mode in modes if refused_mode(mode, head) is None)


def default_modes(head: str) -> tuple[str, ...]:
    """What is decoded where no modes are named: plain decoding, the drafter's own chain and, if it has a head on a
    backbone, the backbone alone."""
    if head in (NONE, *ROW_DRAFTERS):
        return (BASELINE, DRAFT)
    return (BASELINE, BACKBONE, DOMINO if head == DOMINO_HEAD else DRAFT)


def canonical_mode(mode: str) -> str:
    """`draft` for its synonym `domino`."""
    return DRAFT if mode == DOMINO else mode


# ------------------------------------------------------------------------------------------------- sampling


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. Applied in the order of the fields."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def pool(self) -> int:
        """How many of the largest logits to find, 0 for none."""
        return self.top_k

    @property
    def nucleus(self) -> bool:
        return self.top_p < 1.0

    @property
    def searched(self) -> bool:
        """Whether top-p has to search its threshold because no top-k pool holds all of the mass."""
        return self.nucleus and not self.top_k

    def problem(self) -> Problem | None:
        """The first value out of range, NaN included; None if all are fine."""
        ranges = (
            ("temperature", 0 <= self.temperature < math.inf, "set it to 0 (greedy) or a finite number above"),
            ("top_k", self.top_k >= 0, "set it to 0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "set it above 0 and at most 1 (1 is off)"),
            ("min_p", 0 <= self.min_p < 1, "set it to 0 (off) or more, below 1"),
        )
        return next((Problem(name, getattr(self, name), change) for name, fine, change in ranges if not fine), None)

    def columns(self) -> tuple:
        """(temperature, top_k, top_p, min_p), each a number or an array that broadcasts over logits [B, T, V]."""
        return self.temperature, self.top_k, self.top_p, self.min_p


# -------------------------------------------------------------------------------------------------- drafting


@dataclasses.dataclass(frozen=True)
class TreeSettings:
    """The shape of a tree and how its nodes are chosen (tree.py).

    nodes: rows of the verifying pass, the root (the anchor) included.
    lanes: paths that the head follows at a time.  candidates: tokens per depth that it chooses among.
    depth: drafts of the longest path, at most what the block gives; 0: num_drafts of DraftSettings.
    beta: added to a node's log-probability for each step of depth, at most 0; lower values give broader trees.
    draft_scale: at temperature > 0 the constant c of a tree that is coupled with the target's noise: a candidate
        scores log-softmax((c·log q + g) / spread). None or inf: not coupled, a candidate scores log q.
    spread: how far the target's choice may be from argmax(c·log q + g).
    """

    nodes: int = 64
    lanes: int = 16
    candidates: int = 64
    beta: float = -0.1
    draft_scale: float | None = None
    spread: float = 1.0
    depth: int = 0

    @property
    def coupled(self) -> bool:
        """Whether its scores read the target's noise where there is some."""
        return self.draft_scale is not None and not math.isinf(self.draft_scale)

    def problem(self) -> Problem | None:
        """The first value that no tree can have; None if all are fine."""
        scale, lanes = self.draft_scale, self.lanes
        ranges = (
            ("nodes", self.nodes >= 2, "give 2 or more, the anchor and at least one draft"),
            ("candidates", self.candidates >= 1, "give 1 or more"),
            ("lanes", lanes >= 1, "give 1 (a chain) or more"),
            (
                "lanes",
                lanes <= self.candidates,
                f"depth 1 has only {self.candidates} (tree.candidates); change one of them",
            ),
            ("depth", self.depth >= 0, "give 0 (as deep as a chain) or more"),
            ("beta", -math.inf < self.beta <= 0, "give 0 or a finite number below"),
            ("draft_scale", scale is None or scale > 0, "give a number above 0; inf is a tree that is not coupled"),
            ("spread", 0 < self.spread < math.inf, "give a finite number above 0"),
        )
        found = (Problem(f"tree.{name}", getattr(self, name), change) for name, fine, change in ranges if not fine)
        return next(found, None)


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """How a round drafts. It changes the speed, never the text.

    use_head: False drafts from base logits alone: a DFlash drafter, or the ablation of a Domino one.
    scale: the constant c of argmax(c·log q + g) at temperature > 0, for chains: 1 shares the target's noise at full
        weight, inf is the greedy draft.
    num_drafts: tokens drafted and verified, at most what the block gives (M); all of them when None. 0 is a plain step.
    widths: pairs (rows, drafts), rows ascending, that replace num_drafts of a chain. A batch takes the first pair
        whose rows are not fewer than its own, else the last pair.
    tree: draft a tree instead of a chain.
    head_candidates: tokens per slot that the head of a chain corrects, those with the largest base logits; 0, or more
        than there are: the whole vocabulary. Drafters without a head do not read it.
    confidence: a chain ends before the first draft whose confidence head gives it a smaller chance to be accepted; it
        may end before its first draft. 0 keeps all, and needs no confidence head.
    """

    use_head: bool = True
    scale: float = math.inf
    num_drafts: int | None = None
    tree: TreeSettings | None = None
    head_candidates: int = 0
    widths: tuple[tuple[int, int], ...] = ()
    confidence: float = 0.0

    def at(self, rows: int) -> "DraftSettings":
        """How a batch of `rows` rows drafts: with num_drafts alone."""
        if self.tree or not self.widths:
            return dataclasses.replace(self, widths=())
        drafts = next((drafts for most, drafts in self.widths if rows <= most), self.widths[-1][1])
        return dataclasses.replace(self, num_drafts=drafts, widths=())

    def width(self, config: "DrafterConfig") -> int:
        """Drafts of a round, of the widest one where there are several; of a tree, those of its longest path."""
        if self.tree and self.tree.depth:
            return self.tree.depth
        if self.widths and not self.tree:
            return max(drafts for _, drafts in self.widths)
        return config.num_drafts if self.num_drafts is None else self.num_drafts

    def verified(self, config: "DrafterConfig") -> int:
        """Drafts that a round verifies; of a tree, all nodes but the root."""
        return self.tree.nodes - 1 if self.tree else self.width(config)

    def out_of_range(self) -> Problem | None:
        """A value that no drafter has."""
        if self.head_candidates < 0:
            return Problem("head_candidates", self.head_candidates, "set it to 0 (the whole vocabulary) or more")
        if (self.num_drafts or 0) < 0:
            return Problem("num_drafts", self.num_drafts, "set it to 0 (all that the block gives) or more")
        if not 0 <= self.confidence <= 1:  # False for NaN as well
            return Problem("confidence", self.confidence, "give a chance from 0 (off) to 1")
        return None

    def problem(self, block_size: int, block_drafts: int, most: int | None = None) -> Problem | None:
        """A width that a block of `block_size` slots, which gives `block_drafts` drafts, does not have.

        most: of a drafter whose chains may be longer than the usual block.
        """
        most = most or block_drafts
        change = f"but a block of {block_size} slots gives {block_drafts} drafts; lower it, or set 0"
        if most > block_drafts:
            change = f"but this drafter's chains have at most {most} drafts; lower it, or set 0"
        widest = max([self.num_drafts or 0, *(drafts for _, drafts in self.widths)])
        if widest > most:
            return Problem("num_drafts", widest, change)
        tree = self.tree
        if not tree:
            return None
        if tree.depth > block_drafts:
            return Problem("tree.depth", tree.depth, change)
        depth = tree.depth or self.num_drafts or block_drafts
        most = depth * tree.lanes + 1
        if tree.nodes > most:
            change = f"but {tree.lanes} lanes of {depth} drafts and the anchor are {most}; lower it or raise tree.lanes"
            return Problem("tree.nodes", tree.nodes, change)
        return None


def vocabulary_problem(tree: TreeSettings, vocab: int) -> Problem | None:
    """More candidates than there are tokens."""
    if tree.candidates <= vocab:
        return None
    return Problem("tree.candidates", tree.candidates, f"but the vocabulary has {vocab} tokens; lower it")


def cache_problem(tree: TreeSettings, cache_slots: int, max_new_tokens: int) -> Problem | None:
    """A tree that leaves no room for a prompt in the cache."""
    if cache_slots > max_new_tokens + tree.nodes:
        return None
    change = (
        f"but a cache_length of {cache_slots} with max_new_tokens {max_new_tokens} has no room for them after a prompt;"
        " raise cache_length or use fewer nodes"
    )
    return Problem("tree.nodes", tree.nodes, change)


def parity_problem(parity: str, tree: TreeSettings | None) -> Problem | None:
    """fixed_shape together with a tree."""
    if parity != "fixed_shape" or tree is None:
        return None
    change = (
        "it is a promise for chains, because the siblings of a tree change the order of its sums; set it to near_tie,"
        " or take tree out of decode.modes"
    )
    return Problem("parity", parity, change)


# ---------------------------------------------------------------------------------------------- generators


@dataclasses.dataclass(frozen=True)
class GeneratorSettings:
    """What a generator is made for.

    cache_slots: the most slots that the key/value caches may have; prompt, answer and one block must fit.
    smallest_cache: slots of the caches of short texts. They grow by doubling, to cache_slots at most. Fewer slots cost
        less to read; each size is a separate program for every mode.
    max_new_tokens: size of the token buffer, the most that an answer may have.
    batch_size: the most rows decoded together; when one ends, the next prompt takes its place.
    sampling, seed: of requests that set none.
    drafting: how to draft; the mode decides whether with the head and whether a tree.
    stop_ids: token ids that end an answer.
    fixed_shape: plain decoding runs through a pass as wide as a round's, so that texts are equal to the last bit in
        every dtype; otherwise they may differ at near ties.
    simulated_tau: force this acceptance length (rounds.simulated_accepts).
    """

    cache_slots: int
    max_new_tokens: int
    batch_size: int = 1
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    drafting: DraftSettings = DraftSettings()
    stop_ids: tuple[int, ...] = ()
    fixed_shape: bool = False
    simulated_tau: float | None = None
    smallest_cache: int = 256

    def block_rows(self, drafter: "DrafterConfig | None") -> int:
        """Cache rows that a round writes after the committed length: the block, or the anchor and the drafts."""
        if not drafter:
            return 1
        tree = self.drafting.tree
        chain = dataclasses.replace(self.drafting, tree=None).width(drafter) + 1  # a tree may be less deep
        return max(drafter.block_size, chain, self.drafting.width(drafter) + 1, tree.nodes if tree else 0)

    def check(self, vocab: int, drafter: "DrafterConfig | None") -> None:
        """Raises DominoError for settings that do not fit a vocabulary of `vocab` tokens and this drafter."""
        tree = self.drafting.tree
        problems = [self.sampling.problem(), self.drafting.out_of_range()]
        if self.fixed_shape and not drafter:
            problems.append(Problem("parity", "fixed_shape", "it needs a drafter, whose width plain decoding runs in"))
        if tree and drafter:
            problems += [
                tree.problem(),
                vocabulary_problem(tree, vocab),
                cache_problem(tree, self.cache_slots, self.max_new_tokens),
                parity_problem("fixed_shape" if self.fixed_shape else "near_tie", tree),
            ]
        if drafter:
            problems.append(self.drafting.problem(drafter.block_size, drafter.num_drafts, drafter.most_drafts))
        if drafter and self.drafting.confidence and not (drafter.head == MARKOV and drafter.enable_confidence_head):
            change = "but this drafter has no confidence head; set it to 0"
            problems.append(Problem("confidence", self.drafting.confidence, change))
        for problem in filter(None, problems):
            raise DominoError(f"decode.{problem}")
