"""Settings of sampling and of drafting as plain values, with the rules that they obey.

A field that is made by `key` is a key of the recipe's decode section, with its default and range here. Nothing here
imports jax, so that a recipe is checked before jax starts.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from domino_jax.runtime.keys import key, keys_of

if TYPE_CHECKING:
    from domino_jax.method.config import DrafterConfig


class Problem(NamedTuple):
    """A value that cannot be used, and what to change."""

    name: str
    value: Any
    change: str

    def __str__(self) -> str:
        return f"{self.name} is {self.value!r}{', ' if self.change.startswith('but ') else ': '}{self.change}."


def first_problem(settings: Any, *rules: tuple[str, Any, str], section: str = "") -> Problem | None:
    """The first key whose value is out of range, NaN included, or else the first broken rule.

    rules: (field, whether its value is fine, what to change).
    """
    for name, declared in keys_of(type(settings)).items():
        if change := declared.problem(getattr(settings, name)):
            return Problem(section + name, getattr(settings, name), change)
    broken = (Problem(section + name, getattr(settings, name), change) for name, fine, change in rules if not fine)
    return next(broken, None)


# ------------------------------------------------------------------------------------------------- sampling


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Changes to the target's distribution, applied in the order of the fields."""

    temperature: float = key(0.0, least=0, below=math.inf)  # 0: greedy
    top_k: int = key(0, least=0)  # 0: off
    top_p: float = key(1.0, above=0, most=1)  # 1: off
    min_p: float = key(0.0, least=0, below=1)  # 0: off

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def kind(self) -> "SamplingKind":
        return SamplingKind.of([self])

    def problem(self) -> Problem | None:
        """The first value out of range; None if all are fine."""
        return first_problem(self)

    def columns(self) -> tuple:
        """(temperature, top_k, top_p, min_p), each a number or an array that broadcasts over logits [B, T, V]."""
        return self.temperature, self.top_k, self.top_p, self.min_p


SAMPLING_VALUES = tuple(vars(SamplingParams()))  # names of its fields, in their order


@dataclasses.dataclass(frozen=True)
class SamplingKind:
    """The steps of sampling that the requests of a batch need together, so that no program does more.

    greedy: nothing is drawn.  pool: how many of the largest logits to find, 0 for none.  nucleus: top-p is on.
    searched: top-p has to search its threshold, because no top-k pool holds all of the mass.
    delayed: some rows have min_tokens, before which no stop id is chosen.
    """

    greedy: bool
    pool: int
    nucleus: bool
    searched: bool
    delayed: bool = False

    @classmethod
    def of(cls, params: Sequence[SamplingParams], delayed: bool = False) -> "SamplingKind":
        return cls(
            greedy=all(row.greedy for row in params),
            pool=max(row.top_k for row in params),
            nucleus=any(row.top_p < 1.0 for row in params),
            searched=any(row.top_p < 1.0 and not row.top_k for row in params),
            delayed=delayed,
        )


# -------------------------------------------------------------------------------------------------- drafting


@dataclasses.dataclass(frozen=True)
class TreeSettings:
    """The shape of a tree and how its nodes are chosen (tree.py)."""

    nodes: int = key(64, least=2)  # rows of the verifying pass, the root (the anchor) included
    lanes: int = key(16, least=1)  # paths that the head follows at a time; 1 is the chain
    candidates: int = key(64, least=1)  # tokens per depth that it chooses among
    # Added to a node's log-probability for each step of depth; lower values give broader trees.
    beta: float = key(-0.1, above=-math.inf, most=0)
    # Drafts of the longest path, at most what the block gives; 0: the number of a chain.
    depth: int = key(0, least=0)

    def problem(self) -> Problem | None:
        """The first value that no tree can have; None if all are fine."""
        lanes = f"depth 1 has only {self.candidates} (tree.candidates); change one of them"
        return first_problem(self, ("lanes", self.lanes <= self.candidates, lanes), section="tree.")


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """Choices of a round's draft. They change the speed, never the text.

    tree: draft a tree instead of a chain.
    use_head: False drafts from base logits alone: a DFlash drafter, or the ablation of a Domino one.
    """

    # Tokens drafted and verified, at most. None, in a recipe 0: all that the drafter's block gives.
    num_drafts: int | None = key(None, recipe=0, least=0)
    # c of drafts at temperature > 0: a chain drafts argmax(c·log q + g), with q the drafter's distribution and g the
    # noise with which the target chooses; a tree ranks tokens by log-softmax(log q + g/c). At 1 a drafter with q = p is
    # always accepted; a larger c follows q more sharply, and inf is the greedy draft. The text stays the same. 2 keeps
    # most of what 1 gains where the target is unsure, and costs little where it is sure (docs/decoding.md).
    draft_sharpness: float = key(2.0, above=0)
    # Tokens per slot that the head of a chain corrects, the likeliest of the backbone. 0: the whole vocabulary, whose
    # matrix is then read once per draft (docs/compilers.md).
    head_candidates: int = key(64, least=0)
    # Passes over the block in which the head of a chain drafts, all slots at once in each. 0: as the drafter's config
    # says, in most cases slot after slot. No key of the recipe: for studies.
    head_passes: int = 0
    # Tokens that can be drafted, the most frequent ones of the training rows' answers. 0: all. The lm_head and the
    # head's last matrix are read for these alone, by the draft and not by the verifying pass (docs/decoding.md). For a
    # drafter without stored counts the answers of data.train are counted.
    draft_vocab: int = key(0, least=0)
    draft_vocab_rows: str | None = None
    # Rows at the end of the text that the draft's backbone reads. 0: all of the text. It helps a drafter that was
    # trained on short texts with long ones.
    draft_window: int = key(0, least=0)
    # int8: the drafter's matrices and a copy of the lm_head in eight bits, one scale for each output channel, rounded
    # when the drafter is loaded. The text stays the same; the draft reads half of the bytes (docs/decoding.md).
    # dtype: in the type of the computation.
    draft_weights: str = key("dtype", choices=("dtype", "int8"))
    tree: TreeSettings | None = None
    use_head: bool = True

    def width(self, config: "DrafterConfig") -> int:
        """Drafts of a round; of a tree, the drafts of its longest path."""
        if self.tree and self.tree.depth:
            return self.tree.depth
        return config.num_drafts if self.num_drafts is None else self.num_drafts

    def verified(self, config: "DrafterConfig") -> int:
        """Drafts that a round verifies; of a tree, all nodes but the root."""
        return self.tree.nodes - 1 if self.tree else self.width(config)

    def block_rows(self, config: "DrafterConfig") -> int:
        """Cache rows that a round writes after the committed length: the block, or the anchor and the drafts."""
        chain = dataclasses.replace(self, tree=None).width(config) + 1  # a tree may be less deep
        return max(config.block_size, chain, self.width(config) + 1, self.tree.nodes if self.tree else 0)

    def problem(self) -> Problem | None:
        """A value that no drafter has."""
        most = max(self.head_candidates, self.tree.candidates if self.tree else 0)
        fewer = f"but a slot has {most} candidates (head_candidates, tree.candidates); raise it or lower them"
        problem = first_problem(
            self,
            ("draft_vocab", not self.draft_vocab or self.draft_vocab >= most, fewer),
        )
        return problem or (self.tree and self.tree.problem())

    def vocabulary_problem(self, config: "DrafterConfig") -> Problem | None:
        """A draft vocabulary that this drafter cannot have."""
        size, vocab, least = self.draft_vocab, config.vocab_size, config.only_candidates
        counted = f"but an {config.title} drafter has a draft vocabulary already; set it to 0"
        few = f"but the drafter's head chooses among {least} tokens; raise it, or set it to 0"
        return first_problem(
            self,
            ("draft_vocab", not size or config.has_backbone, counted),
            ("draft_vocab", size <= vocab, f"but the target has {vocab} tokens; lower it, or set it to 0"),
            ("draft_vocab", not size or size >= least, few),
        )

    def drafter_problem(self, config: "DrafterConfig") -> Problem | None:
        """A window, a number of drafts or a tree that this drafter does not have."""
        tree, size, most, depth = self.tree, config.block_size, config.most_drafts, self.width(config)
        blind = "but this drafter has no backbone that reads the text; set it to 0"
        narrow = f"but this drafter's block has {size} slots; give at least that, or 0 for no window"
        fewer = f"but this drafter makes at most {most} drafts; lower it, or set 0"
        problem = first_problem(
            self,
            ("draft_window", not self.draft_window or config.has_backbone, blind),
            ("draft_window", not 0 < self.draft_window < size, narrow),
            ("num_drafts", (self.num_drafts or 0) <= most, fewer),
        )
        if problem or not tree:
            return problem
        largest = depth * tree.lanes + 1
        lanes = f"but {tree.lanes} lanes of {depth} drafts and the anchor are {largest}; lower it or raise tree.lanes"
        rules = ("depth", tree.depth <= most, fewer), ("nodes", tree.nodes <= largest, lanes)
        return first_problem(tree, *rules, section="tree.")
