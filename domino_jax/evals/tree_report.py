"""How trees do: recorded rounds, acceptance by depth and by rank, pictures of real trees.

A recording runs a few prompts round by round and reads every round, which a measured run never does; it is not timed.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from domino_jax.decoding.generate import Generator
from domino_jax.decoding.rounds import tree_round
from domino_jax.decoding.settings import TREE
from domino_jax.drafters.pair import Models
from domino_jax.runtime.figures import figure_of, save

TREES = "trees.png"

# Rounds drawn, and the nodes that a picture still shows legibly.
DRAWN, LEGIBLE = 4, 64


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


def record_trees(
    models: Models, generator: Generator, prompts: Sequence[Sequence[int]], rounds: int = 8
) -> list[list[RecordedTree]]:
    """For each prompt its first `rounds` rounds (fewer when it ends before), of a generator with a tree."""
    one = jax.jit(functools.partial(_round, generator))
    recorded = []
    for index, prompt in enumerate(prompts):
        state = generator.start(models, [prompt], [index], rows=1)
        trees = []
        while len(trees) < rounds and not state.done[0]:
            state, seen = one(models, state, generator.stop_ids)
            trees.append(_read(jax.device_get(seen)))
        recorded.append(trees)
    return recorded


def _round(generator: Generator, models, state, stop_ids):
    return tree_round(models, state, stop_ids, generator.settings.sampling, generator.drafting(TREE))


def _read(seen: Any) -> RecordedTree:
    """The first row of a rounds.TreeRound."""
    filled = [0, *np.flatnonzero(seen.tree.depths[0] > 0).tolist()]
    number = {node: place for place, node in enumerate(filled)}
    accepted = int(seen.accepted[0])
    path = seen.path[0, : accepted + 1].tolist()
    return RecordedTree(
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


def acceptance_table(found: dict[str, Any]) -> str:
    """`acceptance` as Markdown."""
    depths = range(1, len(found["by_depth"]) + 1)
    rows = [
        ["depth", *map(str, depths)],
        ["rounds that accept a draft there", *(f"{share:.2f}" for share in found["by_depth"])],
        ["drafts of a tree there", *(f"{count:.1f}" for count in found["nodes_by_depth"])],
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    ranks = ", ".join(f"{share:.1%} rank {rank}" for rank, share in enumerate(found["by_rank"], 1))
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:], "", f"Accepted drafts by rank: {ranks}."])


def legible(tree: RecordedTree) -> RecordedTree:
    """A tree of more than LEGIBLE nodes cut to the accepted path and the likeliest of its siblings."""
    if len(tree.tokens) <= LEGIBLE:
        return tree
    ranks = sibling_ranks(tree)
    beside = [node for node in range(1, len(ranks)) if tree.parents[node] in tree.path and node not in tree.path]
    room = LEGIBLE - len(tree.path)
    kept = sorted([*tree.path, *sorted(beside, key=lambda node: ranks[node])[:room]])
    number = {node: place for place, node in enumerate(kept)}
    return RecordedTree(
        tokens=[tree.tokens[node] for node in kept],
        parents=[number[tree.parents[node]] for node in kept],
        depths=[tree.depths[node] for node in kept],
        path=[number[node] for node in tree.path],
        emitted=tree.emitted,
    )


def draw_trees(trees: Sequence[RecordedTree], say: Callable[[int], str], folder: Path) -> Path:
    """<folder>/trees.png: a few trees with the accepted path marked.

    Args:
        say: a token id as text.
        trees: those whose accepted path leaves the likeliest child are drawn first, because they show the gain.
    """
    telling = sorted(trees, key=lambda tree: -sum(rank > 1 for rank in np.take(sibling_ranks(tree), tree.path)))
    whole = telling[:DRAWN]
    shown = [legible(tree) for tree in whole]
    heights = [max(2.0, 0.3 * max(Counter(tree.depths).values())) for tree in shown]
    figure = figure_of(11, sum(heights) + 0.6)
    places = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, tree, drawn in zip(places, whole, shown, strict=True):
        _draw(axes, drawn, say)
        title = f"{len(tree.path) - 1} of {len(tree.tokens) - 1} drafts accepted, then {say(tree.emitted)!r}"
        cut = f" ({len(drawn.tokens) - 1} drawn)" if drawn is not tree else ""
        axes.set_title(title.replace("$", r"\$") + cut, fontsize=9)
    save(folder, {TREES: figure})
    return folder / TREES


def _draw(axes, tree: RecordedTree, say: Callable[[int], str]) -> None:
    """Depth to the right, nodes of a depth below each other in the order of their scores."""
    met: Counter = Counter()
    places = []
    for depth in tree.depths:
        places.append((depth, -met[depth]))
        met[depth] += 1
    for node, parent in enumerate(tree.parents[1:], 1):
        kept = node in tree.path
        ends = zip(places[parent], places[node], strict=True)
        axes.plot(*ends, color="tab:green" if kept else "0.8", linewidth=2.2 if kept else 0.8, zorder=1)
    for node, (token, place) in enumerate(zip(tree.tokens, places, strict=True)):
        kept = node in tree.path
        box = {"boxstyle": "round,pad=0.2", "facecolor": "#c9ecc9" if kept else "white", "edgecolor": "0.6"}
        text = say(token).replace("\n", "⏎").replace("$", r"\$") or "·"
        axes.annotate(text, place, fontsize=7, ha="center", va="center", bbox=box, zorder=2)
    axes.set_xlim(-0.5, max(tree.depths) + 0.5)
    axes.margins(y=0.12)
    axes.set_yticks([])
    axes.set_xlabel("depth", fontsize=8)
