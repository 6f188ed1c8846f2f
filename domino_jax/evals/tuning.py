"""Measures how to draft on this device: how many drafts a round should verify, and which tree.

A wider round emits more tokens and takes longer. How many more depends on the drafter and the prompts, and is recorded
on a few prompts. How much longer depends on the device and the rows of a batch, and is timed for batches of 1, 2, 4, …
rows. Together they give the expected rate. A width of 0 is a plain step, which extends the drafter's context too, so
that a smaller batch can draft again. Trees are timed in the largest batch. They are not decoded one by one: all nodes
that lanes meet are recorded once, and every size and beta is replayed over them (trees.py). The lanes and the beta with
the highest τ of each size are timed.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import rich.console
import rich.table

from domino_jax.decoding.acceptance import accept_histogram, accept_rates, tau_pooled
from domino_jax.decoding.generate import Generation, Generator, new_generator
from domino_jax.evals.round_times import endless, round_stopwatch, turn_seconds
from domino_jax.evals.trees import record, replayed_tau, unrecorded
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.pair import Models
from domino_jax.method.settings import (
    BACKBONE,
    BASELINE,
    DRAFT,
    TREE,
    DecodeSettings,
    TreeSettings,
    refused_mode,
)

PROBES = 8  # prompts on which the acceptance of widths and trees is recorded
NODES = (16, 32, 64, 128)
BETAS = (0.0, -0.1, -0.2, -0.3)
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Shape:
    """One shape of a round; nodes, lanes and beta are 0 for a chain."""

    mode: str
    num_drafts: int
    nodes: int = 0
    lanes: int = 0
    beta: float = 0.0

    @property
    def name(self) -> str:
        tree = f"{self.nodes} nodes, {self.lanes} lanes, beta {self.beta:g}"
        return f"{self.mode}, {tree if self.nodes else f'{self.num_drafts} drafts'}"

    def tree(self, base: TreeSettings | None) -> TreeSettings | None:
        """The tree `base` in this shape, None for a chain."""
        if not self.nodes:
            return None
        return dataclasses.replace(base, nodes=self.nodes, lanes=self.lanes, beta=self.beta, depth=self.num_drafts)


@dataclasses.dataclass(frozen=True)
class Timed:
    """One shape in batches of `rows` rows.

    tau: expected tokens of a round, from recorded acceptance.  milliseconds: of a round, median.
    """

    shape: Shape
    rows: int
    tau: float
    milliseconds: float
    tokens_per_second: float


def chain_mode(modes: Sequence[str]) -> str:
    """The chain to tune: the backbone's where the modes have no other chain, else the drafter's own."""
    return BACKBONE if set(modes) - {BASELINE, TREE} == {BACKBONE} else DRAFT


def tune(
    models: Models, settings: DecodeSettings, stop_ids: Sequence[int], mode: str, prompts: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[int, int], ...], TreeSettings | None]:
    """The fastest numbers of drafts by the rows of a batch (DraftSettings.widths), and the fastest tree, if any.

    Prints what it measures.

    Args:
        settings: with the tree to start from, or none to leave trees out.
        mode: of the chain.
    """
    config = models.drafter.config
    if settings.drafting.tree and (refused := refused_mode(TREE, config) or unrecorded(config)):
        print(f"no trees are measured: {refused}.")
        settings = settings.change(tree=None)
    timed = measure_shapes(models, settings, stop_ids, mode, prompts[:PROBES])
    show_timed(timed, len(prompts[:PROBES]))
    widths = {}
    for one in timed:
        if not one.shape.nodes:
            widths.setdefault(one.rows, one.shape.num_drafts)
    trees = [one.shape.tree(settings.drafting.tree) for one in timed if one.shape.nodes]
    return tuple(sorted(widths.items())), next(iter(trees), None)


def show_timed(timed: Sequence[Timed], prompts: int) -> None:
    """Prints a row for each shape: the smallest batch first, and of a batch the fastest shape first."""
    columns = ("rows × round", "τ", "ms a round", "tokens/s")
    table = rich.table.Table(title=f"expected rate by rows and shape, acceptance recorded on {prompts} prompts")
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right", min_width=len(name.split()[-1]))
    for one in sorted(timed, key=lambda one: one.rows):
        figures = (f"{one.tau:.2f}", f"{one.milliseconds:.2f}", f"{one.tokens_per_second:,.0f}")
        table.add_row(f"{one.rows} × {one.shape.name}", *figures)
    rich.console.Console().print(table)


# -------------------------------------------------------------------------------------------------------- shapes


def chains_of(config: AnyConfig, mode: str) -> list[Shape]:
    """Four chains, the widest first, and a plain step."""
    whole = config.num_drafts
    widths = [whole, *(2**power for power in range(8, -1, -1) if 2**power < whole)]
    return [Shape(mode, width) for width in (*widths[:4], 0)]


def trees_of(settings: DecodeSettings, widest: Shape) -> dict[int, list[Shape]]:
    """Nodes → trees of that size as deep as the widest chain: the settings' lanes and half of them, several betas."""
    tree = settings.drafting.tree
    if not tree:
        return {}
    room = (settings.cache_length - settings.max_new_tokens) // 2
    betas = sorted({tree.beta, *BETAS}, reverse=True)
    trees = {}
    for nodes in NODES:
        shapes = [
            Shape(TREE, widest.num_drafts, nodes, lanes, beta)
            for lanes in (tree.lanes // 2, tree.lanes)
            if lanes and nodes <= min(widest.num_drafts * lanes + 1, room)
            for beta in betas
        ]
        if shapes:
            trees[nodes] = shapes
    return trees


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, … up to `largest`, which is the last one."""
    return [*(2**power for power in range((largest - 1).bit_length())), largest]


def measure_shapes(
    models: Models, settings: DecodeSettings, stop_ids: Sequence[int], mode: str, prompts: Sequence[Sequence[int]]
) -> list[Timed]:
    """Chains of all widths in batches of all sizes, and of every size of tree the best in the largest; fastest first.

    All shapes of a batch are timed alternately.
    """
    chains = chains_of(models.drafter.config, mode)
    answers = _generator(models, settings, stop_ids, chains[0]).generate(models, prompts, mode).answers
    rates = accept_rates(accept_histogram(answers, chains[0].num_drafts + 1))[0]
    tau = {shape: 1 + math.fsum(rates[: shape.num_drafts]) for shape in chains}
    tau[chains[0]] = tau_pooled(answers)
    tau |= _best_trees(models, settings, prompts, answers, chains[0])
    timed = []
    for rows in batch_sizes(settings.batch_size):
        shapes = {shape: value for shape, value in tau.items() if rows == settings.batch_size or not shape.nodes}
        timed += _time_shapes(models, settings, shapes, prompts, rows)
    return sorted(timed, key=lambda one: -one.tokens_per_second)


def _time_shapes(
    models: Models,
    settings: DecodeSettings,
    tau: Mapping[Shape, float],
    prompts: Sequence[Sequence[int]],
    rows: int,
) -> list[Timed]:
    """The shapes in `tau` in a batch of `rows` rows."""
    stopwatches, live = {}, None
    for shape in tau:
        generator = _generator(models, settings, (), shape, rows)
        if live is None:
            live = endless(generator.start(models, prompts[:rows], range(len(prompts[:rows])), rows=rows))
        stopwatches[shape] = round_stopwatch(models, generator, live, shape.mode)
    return [
        Timed(shape, rows, tau[shape], spent * 1e3, rows * tau[shape] / max(spent, 1e-9))
        for shape, spent in turn_seconds(stopwatches, REPEATS).items()
    ]


def _best_trees(
    models: Models,
    settings: DecodeSettings,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Generation],
    widest: Shape,
) -> dict[Shape, float]:
    """The tree of each size that would have emitted most per round of these answers, with its τ."""
    by_nodes = trees_of(settings, widest)
    recordings = {}
    for lanes in sorted({shape.lanes for shapes in by_nodes.values() for shape in shapes}):
        smallest = Shape(TREE, widest.num_drafts, nodes=2, lanes=lanes)
        recordings[lanes] = record(models, _generator(models, settings, (), smallest), prompts, answers)
    best = {}
    for shapes in by_nodes.values():
        tau = {shape: replayed_tau(recordings[shape.lanes], shape.tree(settings.drafting.tree)) for shape in shapes}
        shape = max(tau, key=tau.get)  # ties go to fewer lanes
        best[shape] = tau[shape]
    return best


def _generator(
    models: Models, settings: DecodeSettings, stop_ids: Sequence[int], shape: Shape, rows: int = 0
) -> Generator:
    """One that drafts in this shape; its plain steps, of batches of `rows` rows, extend the drafter's context."""
    drafts = shape.num_drafts or models.drafter.config.num_drafts
    widths = () if shape.num_drafts else ((rows, 0), (rows + 1, drafts))
    tree = shape.tree(settings.drafting.tree)
    return new_generator(models, settings.change(num_drafts=drafts, tree=tree, widths=widths), stop_ids)
