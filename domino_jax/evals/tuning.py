"""Measures how to draft on this device: the coupling with the target's noise, the width of the draft, a tree's shape.

Coupling: at temperature > 0 a draft is argmax(c·log q + g), with a large c the greedy draft, with c = 1 fully coupled
with the target's noise g. Which c is best depends on how well q fits p, so prompts are decoded with several.

Width: a wider round emits more tokens and takes longer. How many more depends on the drafter and the prompts, and is
recorded on a few prompts. How much longer depends on the device and the rows of a batch, and is timed for batches of 1,
2, 4, … rows. Together they give the expected rate. A width of 0 is a plain step, which extends the drafter's context
too, so that a smaller batch can draft again. Trees are timed in the largest batch. They are not decoded one by one: all
nodes that lanes meet are recorded once, and every size and beta is replayed over them (trees.py). The lanes and the
beta with the highest τ of each size are timed.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table

from domino_jax.decoding.acceptance import accept_histogram, accept_rates, tau_pooled
from domino_jax.decoding.decode_settings import Tuning
from domino_jax.decoding.generate import Generation, Generator, new_generator
from domino_jax.evals.round_times import endless, round_stopwatch, turn_seconds
from domino_jax.evals.summary import ratio
from domino_jax.evals.tables import say
from domino_jax.evals.trees import record, replayed_tau, unrecorded
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.pair import Models
from domino_jax.method.settings import (
    BACKBONE,
    BASELINE,
    DRAFT,
    TREE,
    DraftSettings,
    GeneratorSettings,
    TreeSettings,
    refused_mode,
)
from domino_jax.runtime.progress import Progress
from domino_jax.weights.loading import shortened

PROBES = 8  # prompts on which the acceptance of widths and trees is recorded
SCALES = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)
TREE_SCALES, SPREADS = (1.0, 2.0, 3.0, 5.0), (1.0, 2.0, 3.0)
NODES = (16, 32, 64, 128)
BETAS = (0.0, -0.1, -0.2, -0.3)
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Shape:
    """One shape of a round; nodes, lanes and beta are 0 for a chain."""

    mode: str
    block_size: int
    num_drafts: int
    nodes: int = 0
    lanes: int = 0
    beta: float = 0.0

    @property
    def name(self) -> str:
        tree = f"{self.nodes} nodes, {self.lanes} lanes, beta {self.beta:g}"
        return f"{self.mode}, block {self.block_size}, {tree if self.nodes else f'{self.num_drafts} drafts'}"

    def tree(self, base: TreeSettings | None) -> TreeSettings | None:
        """The tree `base` in this shape, None for a chain."""
        if not self.nodes:
            return None
        return dataclasses.replace(base, nodes=self.nodes, lanes=self.lanes, beta=self.beta, depth=self.num_drafts)


@dataclasses.dataclass(frozen=True)
class Timed:
    """One shape in batches of `rows` rows.

    tau: expected tokens of a round, from recorded acceptance.  milliseconds: of a round, median.
    break_even_tau: a round's time over that of a step of plain decoding.
    """

    shape: Shape
    rows: int
    tau: float
    milliseconds: float
    tokens_per_second: float
    break_even_tau: float | None

    def as_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {**values.pop("shape"), **values}


def chain_mode(modes: Sequence[str]) -> str:
    """The chain to tune: the backbone's where the modes have no other chain, else the drafter's own."""
    return BACKBONE if set(modes) - {BASELINE, TREE} == {BACKBONE} else DRAFT


def tune(
    models: Models, settings: GeneratorSettings, mode: str, prompts: Sequence[Sequence[int]]
) -> tuple[Tuning, list[Timed]]:
    """The fastest way to draft by the rows of a batch, and all that was timed, fastest first. Prints what it measures.

    Args:
        settings: with the tree to start from, or none to leave trees out.
        mode: of the chain.
    """
    config = models.drafter.config
    if settings.drafting.tree and (refused := refused_mode(TREE, config.head) or unrecorded(config)):
        print(f"no trees are measured: {refused}.")
        settings = dataclasses.replace(settings, drafting=dataclasses.replace(settings.drafting, tree=None))
    if not settings.sampling.greedy:
        for kind in (mode, TREE) if settings.drafting.tree else (mode,):
            settings = dataclasses.replace(settings, drafting=best_coupling(models, settings, kind, prompts))
    timed = measure_shapes(models, settings, mode, prompts[:PROBES])
    show_timed(timed, len(prompts[:PROBES]))
    return choose_shapes(timed, settings.drafting), timed


def choose_shapes(timed: Sequence[Timed], drafting: DraftSettings) -> Tuning:
    """The fastest chain for every number of rows, and the fastest tree.

    All batches, chains and trees have one block: the one whose fastest shapes have the highest rates, in the geometric
    mean over the numbers of rows.

    Args:
        timed: fastest first.
    """
    best: dict[tuple[int, int], Timed] = {}
    for one in timed:
        best.setdefault((one.shape.block_size, one.rows), one)
    logs = Counter()
    for (block, _), one in best.items():
        logs[block] += math.log(max(one.tokens_per_second, 1e-9))
    [(block, _)] = logs.most_common(1)
    widths: dict[int, int] = {}
    for one in timed:
        if one.shape.block_size == block and not one.shape.nodes:
            widths.setdefault(one.rows, one.shape.num_drafts)
    largest = max(widths)
    shapes = [one.shape for one in timed if (one.shape.block_size, one.rows) == (block, largest)]
    trees = [shape.tree(drafting.tree) for shape in shapes if shape.nodes]
    return Tuning(
        mode=TREE if shapes[0].nodes else DRAFT,
        block_size=block,
        num_drafts=next(shape.num_drafts for shape in shapes if shape.num_drafts and not shape.nodes),
        draft_scale=drafting.scale,
        tree=trees[0] if trees else None,
        widths=tuple(sorted(widths.items())),
    )


def show_timed(timed: Sequence[Timed], prompts: int) -> None:
    """Prints a row for each shape: the smallest batch first, and of a batch the fastest shape first."""
    rows = []
    for one in sorted(timed, key=lambda one: one.rows):
        figures = (f"{one.tau:.2f}", say(one.break_even_tau, ".2f"), f"{one.milliseconds:.2f}")
        rows.append((f"{one.rows} × {one.shape.name}", *figures, f"{one.tokens_per_second:,.0f}"))
    heading = f"expected rate by rows and shape, acceptance recorded on {prompts} prompts"
    show_table(heading, ("rows × round", "τ", "break-even τ", "ms a round", "tokens/s"), rows)


# ------------------------------------------------------------------------------------------------------ coupling


def couplings(drafting: DraftSettings, mode: str) -> dict[str, DraftSettings]:
    """By name: without coupling, and with every constant."""
    if mode != TREE:
        scales = {"greedy": math.inf, **{f"coupled, c = {scale:g}": scale for scale in SCALES}}
        return {name: dataclasses.replace(drafting, scale=scale) for name, scale in scales.items()}
    pairs = {"not coupled": (None, 1.0)}
    for c, spread in itertools.product(TREE_SCALES, SPREADS):
        pairs[f"coupled, c = {c:g}, spread {spread:g}"] = (c, spread)
    return {
        name: dataclasses.replace(drafting, tree=dataclasses.replace(drafting.tree, draft_scale=c, spread=spread))
        for name, (c, spread) in pairs.items()
    }


def best_coupling(
    models: Models, settings: GeneratorSettings, mode: str, prompts: Sequence[Sequence[int]]
) -> DraftSettings:
    """The drafting settings with the coupling of the highest τ; prints all of them."""
    candidates = couplings(settings.drafting, mode)
    tau = measure_couplings(models, settings, mode, candidates, prompts)
    best = max(candidates, key=tau.get)
    rows = [(name + (" (best)" if name == best else ""), f"{value:.2f}") for name, value in tau.items()]
    title = f"{mode}: {len(prompts)} prompts, temperature {settings.sampling.temperature:g}"
    show_table(title, ("coupling", "τ pooled"), rows)
    return candidates[best]


def measure_couplings(
    models: Models,
    settings: GeneratorSettings,
    mode: str,
    candidates: Mapping[str, DraftSettings],
    prompts: Sequence[Sequence[int]],
) -> dict[str, float]:
    """τ by name. The texts are the same each time."""
    tau = {}
    with Progress("tune", total=len(candidates)) as progress:
        for name, drafting in candidates.items():
            generator = new_generator(models, dataclasses.replace(settings, drafting=drafting))
            tau[name] = tau_pooled(generator.generate(models, prompts, mode).answers)
            progress.advance(1, f"{name}: τ {tau[name]:.2f}")
    return tau


# -------------------------------------------------------------------------------------------------------- shapes


def chains_of(config: AnyConfig, mode: str) -> list[list[Shape]]:
    """For each block size (the drafter's own and its half) four chains, the widest first, and a plain step.

    A drafter without blocks has one size.
    """
    wholes = {config.block_size: config.num_drafts}
    if config.has_backbone and config.block_size // 2 >= max(2, config.suffix_start + 1):
        half = dataclasses.replace(config, block_size=config.block_size // 2)
        wholes[half.block_size] = half.num_drafts
    chains = []
    for block, whole in wholes.items():
        widths = [whole, *(2**power for power in range(8, -1, -1) if 2**power < whole)]
        chains.append([Shape(mode, block, width) for width in (*widths[:4], 0)])
    return chains


def trees_of(settings: GeneratorSettings, widest: Shape) -> dict[int, list[Shape]]:
    """Nodes → trees of that size as deep as the widest chain: the settings' lanes and half of them, several betas."""
    tree = settings.drafting.tree
    if not tree:
        return {}
    room = (settings.cache_slots - settings.max_new_tokens) // 2
    betas = sorted({tree.beta, *BETAS}, reverse=True)
    trees = {}
    for nodes in NODES:
        shapes = [
            Shape(TREE, widest.block_size, widest.num_drafts, nodes, lanes, beta)
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
    models: Models, settings: GeneratorSettings, mode: str, prompts: Sequence[Sequence[int]]
) -> list[Timed]:
    """Chains of all widths in batches of all sizes, and of every size of tree the best in the largest; fastest first.

    All shapes of a batch are timed alternately.
    """
    tau, narrowed = {}, {}
    for chains in chains_of(models.drafter.config, mode):
        block = chains[0].block_size
        drafter = models.drafter.clone(config=shortened(models.drafter.config, block))
        narrowed[block] = models.replace(drafter=drafter)
        answers = _generator(narrowed[block], settings, chains[0]).generate(narrowed[block], prompts, mode).answers
        rates = accept_rates(accept_histogram(answers, chains[0].num_drafts + 1))[0]
        tau |= {shape: 1 + math.fsum(rates[: shape.num_drafts]) for shape in chains}
        tau[chains[0]] = tau_pooled(answers)
        tau |= _best_trees(narrowed[block], settings, prompts, answers, chains[0])
    timed = []
    for rows in batch_sizes(settings.batch_size):
        shapes = {shape: value for shape, value in tau.items() if rows == settings.batch_size or not shape.nodes}
        timed += _time_shapes(narrowed, settings, shapes, prompts, rows)
    return sorted(timed, key=lambda one: -one.tokens_per_second)


def _time_shapes(
    narrowed: Mapping[int, Models],
    settings: GeneratorSettings,
    tau: Mapping[Shape, float],
    prompts: Sequence[Sequence[int]],
    rows: int,
) -> list[Timed]:
    """The shapes in `tau` and a plain step, in a batch of `rows` rows; `narrowed` are the models by block size."""
    stopwatches, live = {}, None
    for shape in tau:
        models = narrowed[shape.block_size]
        generator = _generator(models, settings, shape, rows)
        if live is None:  # blocks of any size have the same context
            live = endless(generator.start(models, prompts[:rows], range(len(prompts[:rows])), rows=rows))
            stopwatches[BASELINE] = round_stopwatch(models, generator, live, BASELINE)
        stopwatches[shape] = round_stopwatch(models, generator, live, shape.mode)
    seconds = turn_seconds(stopwatches, REPEATS)
    step = seconds.pop(BASELINE)
    return [
        Timed(shape, rows, tau[shape], spent * 1e3, rows * tau[shape] / max(spent, 1e-9), ratio(spent, step))
        for shape, spent in seconds.items()
    ]


def _best_trees(
    models: Models,
    settings: GeneratorSettings,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Generation],
    widest: Shape,
) -> dict[Shape, float]:
    """Of each size the tree that would have emitted most per round of these answers, with its τ."""
    by_nodes = trees_of(settings, widest)
    recordings = {}
    for lanes in sorted({shape.lanes for shapes in by_nodes.values() for shape in shapes}):
        smallest = Shape(TREE, widest.block_size, widest.num_drafts, nodes=2, lanes=lanes)
        recordings[lanes] = record(models, _generator(models, settings, smallest), prompts, answers)
    best = {}
    for shapes in by_nodes.values():
        tau = {shape: replayed_tau(recordings[shape.lanes], shape.tree(settings.drafting.tree)) for shape in shapes}
        shape = max(tau, key=tau.get)  # ties go to fewer lanes
        best[shape] = tau[shape]
    return best


def _generator(models: Models, settings: GeneratorSettings, shape: Shape, rows: int = 0) -> Generator:
    """One that drafts in this shape; its plain steps, of batches of `rows` rows, extend the drafter's context."""
    drafts = shape.num_drafts or models.drafter.config.num_drafts
    widths = () if shape.num_drafts else ((rows, 0), (rows + 1, drafts))
    drafting = dataclasses.replace(
        settings.drafting, num_drafts=drafts, tree=shape.tree(settings.drafting.tree), widths=widths
    )
    return new_generator(models, dataclasses.replace(settings, drafting=drafting))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console, table = rich.console.Console(), rich.table.Table(title=title)
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right", min_width=len(name.split()[-1]))
    for row in rows:
        table.add_row(*row)
    console.print(table)
