"""Trees: what recorded rounds accepted, pictures of real trees, and what trees of other shapes would have accepted.

A text does not depend on how it was drafted. So one pass over it gives, for every place where a round could begin, all
nodes that lanes would pass through; sorting them gives those that a tree of some size and beta keeps.
Letters: R places, M depths, W lanes.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from domino_jax.decoding.generate import Generation, Generator
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Models
from domino_jax.method.rounds import TreeRound
from domino_jax.method.settings import TREE, TreeSettings
from domino_jax.method.tree import ROOT, Ledger, draft_ledger
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.figures import figure_of, save

TREES = "trees.png"

# Rounds drawn, and the nodes that a picture still shows legibly.
DRAWN, LEGIBLE = 4, 64


# ----------------------------------------------------------------------------------------------- recorded rounds


@dataclasses.dataclass(frozen=True)
class RecordedTree:
    """One round of one prompt. Lists go by node, 0 the root; places that no draft filled are left out.

    path: the accepted nodes, the root first.  emitted: the target's choice after the last of them.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    path: list[int]
    emitted: int

    @classmethod
    def of(cls, seen: TreeRound) -> "RecordedTree":
        """The first row of a round."""
        filled = [0, *np.flatnonzero(seen.tree.depths[0] > 0).tolist()]
        number = {node: place for place, node in enumerate(filled)}
        path = seen.path[0, : int(seen.accepted[0]) + 1].tolist()
        return cls(
            tokens=seen.tree.tokens[0, filled].tolist(),
            parents=[number[node] for node in seen.tree.parents[0, filled].tolist()],
            depths=seen.tree.depths[0, filled].tolist(),
            path=[number[node] for node in path],
            emitted=int(seen.chosen[0, path[-1]]),
        )


def sibling_ranks(tree: RecordedTree) -> list[int]:
    """Per node its place among its parent's children, 1 for the likeliest; 0 for the root."""
    met: Counter = Counter()
    ranks = [0]
    for parent in tree.parents[1:]:
        met[parent] += 1  # children are in the order of their scores
        ranks.append(met[parent])
    return ranks


def acceptance(trees: Sequence[RecordedTree]) -> dict[str, Any]:
    """Shares over rounds, as report.json holds them.

    by_depth: of the rounds, those that accepted a draft at depth 1, 2, ….  by_rank: of the drafts accepted, those that
    were the likeliest child of their parent, the second, ….  nodes_by_depth: drafts at each depth, a mean over trees.
    """
    deepest = max((depth for tree in trees for depth in tree.depths), default=0)
    ranks = Counter(sibling_ranks(tree)[node] for tree in trees for node in tree.path[1:])
    accepted, total = sum(ranks.values()), len(trees)
    at_depth = Counter(depth for tree in trees for depth in tree.depths[1:])
    lengths = [len(tree.path) - 1 for tree in trees]
    return {
        "rounds": total,
        "by_depth": [sum(length >= depth for length in lengths) / total for depth in range(1, deepest + 1)],
        "by_rank": [ranks[rank] / accepted for rank in range(1, max(ranks, default=0) + 1)],
        "nodes_by_depth": [at_depth[depth] / total for depth in range(1, deepest + 1)],
    }


def acceptance_rows(shares: dict[str, Any]) -> tuple[str, list[list[str]]]:
    """`acceptance` as a sentence about ranks and a table by depth, heading first."""
    ranks = ", ".join(f"{share:.1%} rank {rank}" for rank, share in enumerate(shares["by_rank"], 1))
    return f"Accepted drafts by rank: {ranks}.", [
        ["depth", *map(str, range(1, len(shares["by_depth"]) + 1))],
        ["rounds that accept a draft there", *(f"{share:.2f}" for share in shares["by_depth"])],
        ["drafts of a tree there", *(f"{count:.1f}" for count in shares["nodes_by_depth"])],
    ]


def legible(tree: RecordedTree) -> list[int]:
    """The nodes to draw: all nodes, or, above LEGIBLE, the accepted path and the likeliest of its siblings."""
    if len(tree.tokens) <= LEGIBLE:
        return list(range(len(tree.tokens)))
    ranks = sibling_ranks(tree)
    beside = [node for node in range(1, len(ranks)) if tree.parents[node] in tree.path and node not in tree.path]
    room = LEGIBLE - len(tree.path)
    return sorted([*tree.path, *sorted(beside, key=lambda node: ranks[node])[:room]])


def draw_trees(trees: Sequence[RecordedTree], say: Callable[[int], str], folder: Path) -> Path:
    """<folder>/trees.png: a few trees with the accepted path marked.

    Args:
        say: a token id as text.
        trees: those whose accepted path leaves the likeliest child are drawn first, because they show the gain.
    """
    gainful = sorted(trees, key=lambda tree: -sum(rank > 1 for rank in np.take(sibling_ranks(tree), tree.path)))
    drawn = [(tree, legible(tree)) for tree in gainful[:DRAWN]]
    heights = [max(2.0, 0.3 * max(Counter(tree.depths[node] for node in nodes).values())) for tree, nodes in drawn]
    figure = figure_of(11, sum(heights) + 0.6)
    panels = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (tree, nodes) in zip(panels, drawn, strict=True):
        _draw(axes, tree, nodes, say)
    save(folder, {TREES: figure})
    return folder / TREES


def _draw(axes, tree: RecordedTree, nodes: Sequence[int], say: Callable[[int], str]) -> None:
    """Depth to the right, nodes of a depth below each other in the order of their scores."""
    met: Counter = Counter()
    places = {}
    for node in nodes:
        places[node] = (tree.depths[node], -met[tree.depths[node]])
        met[tree.depths[node]] += 1
    for node in nodes[1:]:
        on_path = node in tree.path
        ends = zip(places[tree.parents[node]], places[node], strict=True)
        axes.plot(*ends, color="tab:green" if on_path else "0.8", linewidth=2.2 if on_path else 0.8, zorder=1)
    for node in nodes:
        on_path = node in tree.path
        box = {"boxstyle": "round,pad=0.2", "facecolor": "#c9ecc9" if on_path else "white", "edgecolor": "0.6"}
        text = say(tree.tokens[node]).replace("\n", "⏎").replace("$", r"\$") or "·"
        axes.annotate(text, places[node], fontsize=7, ha="center", va="center", bbox=box, zorder=2)
    cut = f" ({len(nodes) - 1} drawn)" if len(nodes) < len(tree.tokens) else ""
    title = f"{len(tree.path) - 1} of {len(tree.tokens) - 1} drafts accepted, then {say(tree.emitted)!r}"
    axes.set_title(title.replace("$", r"\$") + cut, fontsize=9)
    axes.set_xlim(-0.5, max(tree.depths) + 0.5)
    axes.margins(y=0.12)
    axes.set_yticks([])
    axes.set_xlabel("depth", fontsize=8)


# -------------------------------------------------------------------------------------------------------- replay


@dataclasses.dataclass(frozen=True)
class Recording:
    """One answer, and what would be drafted after each of its tokens.

    answer: token ids.  ledger: arrays [R, M·W], row r drafted after answer[r]; R is one less than the answer's length.
    """

    answer: Sequence[int]
    ledger: Ledger
    lanes: int


def unrecorded(drafter: AnyConfig) -> str | None:
    """Why `record` cannot be used for this drafter; None where it can."""
    if drafter.has_backbone:
        return None
    return f"trees are compared at every place of an answer, and {drafter.head} keeps the state of its end alone"


def record(
    models: Models, generator: Generator, prompts: Sequence[Sequence[int]], answers: Sequence[Generation]
) -> list[Recording]:
    """For each prompt its answer with the ledgers that the generator's trees are chosen from, for any nodes and beta.

    Args:
        generator: with a tree; its prompts are requests 0, 1, … as in `Generator.generate`.
        answers: to these prompts, by any mode.

    Raises:
        DominoError: a drafter whose cache does not hold the earlier places (`unrecorded`).
    """
    if problem := unrecorded(models.drafter.config):
        raise DominoError(f"{problem}.")
    settings = generator.drafting(TREE)

    @jax.jit
    def ledgers(models: Models, state: DecodeState, starts: jax.Array, anchors: jax.Array) -> Ledger:
        def at(place):
            # Cache rows from `start` on belong to later tokens; they are past the length and never read.
            start, anchor = place
            here = state.replace(lengths=start[None], anchors=anchor[None])
            return draft_ledger(models, here, state.sampling or generator.settings.sampling, settings)[0]

        ledger = jax.lax.map(at, (starts, anchors))
        return jax.tree.map(lambda column: column[:, 0], ledger)

    recorded = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = list(answer.token_ids)
        state = generator.start(models, [[*prompt, *tokens[:-1]]], [index], rows=1)
        # The same number of places for every answer, so that one program serves all; those after the end are dropped.
        places = np.minimum(np.arange(generator.settings.max_new_tokens), max(len(tokens) - 2, 0))
        anchors = np.asarray(tokens, np.int32)[places]
        ledger = jax.device_get(ledgers(models, state, jnp.asarray(len(prompt) + places), anchors))
        recorded.append(
            Recording(tokens, Ledger(*(column[: len(tokens) - 1] for column in ledger)), settings.tree.lanes)
        )
    return recorded


def replay(recording: Recording, tree: TreeSettings) -> list[int]:
    """Tokens emitted per round (accept_lengths of a Generation) with trees of this many nodes and this beta."""
    accepted = _accepted(recording, tree)
    emitted, place = [], 0
    while place < len(accepted):
        emitted.append(min(int(accepted[place]) + 1, len(accepted) - place))
        place += emitted[-1]
    return emitted


def replayed_tau(recordings: Sequence[Recording], tree: TreeSettings) -> float:
    """tau pooled over all rounds of all answers; 0 without rounds."""
    rounds = [emitted for recording in recordings for emitted in replay(recording, tree)]
    return sum(rounds) / len(rounds) if rounds else 0.0


def _accepted(recording: Recording, tree: TreeSettings) -> list[int]:
    """Drafts int [R] that each place's tree would have accepted: the deepest of its nodes on the answer's path."""
    tokens, parents, scores = recording.ledger
    depths = np.arange(tokens.shape[1]) // recording.lanes + 1
    keys = scores + np.float32(tree.beta) * depths.astype(np.float32)
    # As tree.keep_best: the best nodes, ties to the earlier one, and only real paths.
    best = np.argsort(-keys, axis=1, kind="stable")[:, : tree.nodes - 1]
    chosen = np.zeros(keys.shape, bool)
    np.put_along_axis(chosen, best, np.isfinite(np.take_along_axis(keys, best, axis=1)), axis=1)
    accepted = []
    for place in range(len(tokens)):
        node, depth = ROOT, 0
        for token in recording.answer[place + 1 :]:
            level = slice(depth * recording.lanes, (depth + 1) * recording.lanes)
            here = chosen[place, level] & (parents[place, level] == node) & (tokens[place, level] == token)
            if not here.any():
                break
            node, depth = level.start + int(here.argmax()), depth + 1
        accepted.append(depth)
    return accepted
