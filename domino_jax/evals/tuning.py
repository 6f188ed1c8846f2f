"""Measures how to draft on this device: the coupling with the target's noise, the width of the draft, a tree's shape.

Coupling: at temperature > 0 a draft is argmax(c·log q + g), with a large c the greedy draft, with c = 1 fully coupled
with the target's noise g. Which c is best depends on how well q fits p, so prompts are decoded with several.

Width: a wider round emits more tokens and takes longer. How many more depends on the drafter and the prompts, and is
recorded on a few of them; how much longer depends on the device, and is timed. The product is the expected rate. Trees
are not decoded one by one: all nodes that lanes meet are recorded once, and every size and beta is replayed over them
(trees.py). Of each size the lanes and the beta with the highest τ are timed.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table

from domino_jax.decoding.acceptance import accept_histogram, accept_rates, tau_pooled
from domino_jax.decoding.generate import Generation, Generator, new_generator
from domino_jax.decoding.settings import (
    BACKBONE,
    BASELINE,
    DRAFT,
    TREE,
    DraftSettings,
    GeneratorSettings,
    TreeSettings,
    Tuning,
)
from domino_jax.drafters.config import DrafterConfig
from domino_jax.drafters.pair import Models
from domino_jax.evals.round_times import endless, round_stopwatch, turn_seconds
from domino_jax.evals.trees import record, replayed_tau
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
        return dataclasses.replace(base, nodes=self.nodes, lanes=self.lanes, beta=self.beta, depth=0)


@dataclasses.dataclass(frozen=True)
class Timed:
    """tau: expected tokens of a round, from recorded acceptance.  milliseconds: of a round, median."""

    shape: Shape
    tau: float
    milliseconds: float
    tokens_per_second: float

    def as_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {**values.pop("shape"), **values}


def chain_mode(modes: Sequence[str]) -> str:
    """The chain to tune: the backbone's where the modes have no other chain, else the drafter's own."""
    return BACKBONE if set(modes) - {BASELINE, TREE} == {BACKBONE} else DRAFT


def tune(
    models: Models, settings: GeneratorSettings, mode: str, prompts: Sequence[Sequence[int]]
) -> tuple[Tuning, list[Timed]]:
    """The fastest way to draft, and all shapes that were timed, fastest first. Prints what it measures.

    Args:
        settings: with the tree to start from, or none to leave trees out.
        mode: of the chain.
    """
    if not settings.sampling.greedy:
        for kind in (mode, TREE) if settings.drafting.tree else (mode,):
            settings = dataclasses.replace(settings, drafting=best_coupling(models, settings, kind, prompts))
    timed = measure_shapes(models, settings, mode, prompts[:PROBES])
    rows = [
        (one.shape.name, f"{one.tau:.2f}", f"{one.milliseconds:.2f}", f"{one.tokens_per_second:,.0f}") for one in timed
    ]
    heading = f"expected rate by shape, acceptance recorded on {len(prompts[:PROBES])} prompts"
    show_table(heading, ("round", "τ", "ms a round", "tokens/s"), rows)
    best = timed[0].shape
    # One block serves chains and trees.
    shapes = [one.shape for one in timed if one.shape.block_size == best.block_size]
    chain = next(shape for shape in shapes if not shape.nodes)
    trees = [shape.tree(settings.drafting.tree) for shape in shapes if shape.nodes]
    tuning = Tuning(
        mode=TREE if best.nodes else DRAFT,
        block_size=best.block_size,
        num_drafts=chain.num_drafts,
        draft_scale=settings.drafting.scale,
        tree=trees[0] if trees else None,
    )
    return tuning, timed


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


def chains_of(config: DrafterConfig, mode: str) -> list[list[Shape]]:
    """For each block size (the drafter's own and its half) four chains, the widest first."""
    chains = []
    for block in (config.block_size, config.block_size // 2):
        if block >= max(2, config.suffix_start + 1):
            whole = dataclasses.replace(config, block_size=block).num_drafts
            widths = [whole, *(2**power for power in range(8, -1, -1) if 2**power < whole)]
            chains.append([Shape(mode, block, width) for width in widths[:4]])
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


def measure_shapes(
    models: Models, settings: GeneratorSettings, mode: str, prompts: Sequence[Sequence[int]]
) -> list[Timed]:
    """All chains, and of every size of tree the best, on the same prompts and timed alternately; fastest first."""
    tau, stopwatches = {}, {}
    for chains in chains_of(models.drafter.config, mode):
        drafter = models.drafter.clone(config=shortened(models.drafter.config, chains[0].block_size))
        narrowed = models.replace(drafter=drafter)
        widest = _generator(narrowed, settings, chains[0])
        answers = widest.generate(narrowed, prompts, mode).answers
        rates = accept_rates(accept_histogram(answers, chains[0].num_drafts + 1))[0]
        expected = {shape: 1 + math.fsum(rates[: shape.num_drafts]) for shape in chains}
        expected[chains[0]] = tau_pooled(answers)
        expected |= _best_trees(narrowed, settings, prompts, answers, chains[0])
        first = prompts[: settings.batch_size]
        live = endless(widest.start(narrowed, first, range(len(first))))
        for shape in expected:
            generator = _generator(narrowed, settings, shape)
            stopwatches[shape] = round_stopwatch(narrowed, generator, live, shape.mode)
        tau |= expected
    seconds = turn_seconds(stopwatches, REPEATS)
    timed = [
        Timed(shape, tau[shape], spent * 1e3, settings.batch_size * tau[shape] / max(spent, 1e-9))
        for shape, spent in seconds.items()
    ]
    return sorted(timed, key=lambda one: -one.tokens_per_second)


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


def _generator(models: Models, settings: GeneratorSettings, shape: Shape) -> Generator:
    tree = shape.tree(settings.drafting.tree)
    drafting = dataclasses.replace(settings.drafting, num_drafts=shape.num_drafts, tree=tree)
    return new_generator(models, dataclasses.replace(settings, drafting=drafting))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console, table = rich.console.Console(), rich.table.Table(title=title)
    table.add_column(columns[0], no_wrap=True)
    for name in columns[1:]:
        table.add_column(name, justify="right", min_width=len(name.split()[-1]))
    for row in rows:
        table.add_row(*row)
    console.print(table)
