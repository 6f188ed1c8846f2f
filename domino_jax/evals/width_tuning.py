"""Which width is fastest on this device: the draft block, how many tokens of it are verified, a tree (decode.tune).

A wider round emits more tokens and takes longer. How many more is a matter of the drafter and the prompts, and is
recorded from a few of them; how much longer is a matter of the device, and is timed. The product is the expected rate.
Trees are not decoded one by one: all nodes that lanes pass through are recorded once, and every size and beta is
replayed over them (tree_replay.py); of each size the lanes and the beta that emit most are timed.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import rich.console
import rich.table

from domino_jax.decoding.generate import MODES, TREE, Generator
from domino_jax.decoding.measure import accept_histogram, accept_rates, tau_pooled
from domino_jax.decoding.propose import TreeSettings
from domino_jax.decoding.settings import DecodeSettings, new_generator, tree_from_json
from domino_jax.drafters.config import DrafterConfig
from domino_jax.drafters.pair import Models
from domino_jax.evals.round_times import endless, round_stopwatch, turn_seconds
from domino_jax.evals.tree_replay import record, replayed_tau
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.runtime.files import write_whole
from domino_jax.weights.loading import needs_drafter, shortened

TUNED = "tune.json"
CHOSEN = ("block_size", "num_drafts", "modes", "tree")  # what tuning may change
PROBES = 8  # prompts that acceptance is recorded on
NODES = (16, 32, 64, 128)
BETAS = (0.0, -0.1, -0.2, -0.3)
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run a round; nodes, lanes and beta are 0 for a chain."""

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

    def tree(self, settings: DecodeSettings) -> TreeSettings | None:
        """The settings' tree in this shape, None for a chain."""
        own = {"nodes": self.nodes, "lanes": self.lanes, "beta": self.beta, "depth": 0}
        return dataclasses.replace(settings.tree, **own) if self.nodes else None


@dataclasses.dataclass(frozen=True)
class Timed:
    """tau: expected tokens of a round, from recorded acceptance.  milliseconds: of a round, median."""

    option: Option
    tau: float
    milliseconds: float
    tokens_per_second: float


def check_tuning(modes: Sequence[str], compare: Sequence[str]) -> None:
    """Raises DominoError where decode.tune could not do what it says, before anything is loaded."""
    if jax.process_count() > 1:
        raise DominoError(
            "decode.tune measures in each process apart, and several must decode alike: tune in one process, and give"
            " the others what it chose (decode.block_size, decode.num_drafts)."
        )
    if compare:
        raise DominoError(
            "decode.tune chooses the width of one drafter, and decode.compare names several: tune each on its own, or"
            " take decode.tune out."
        )
    if not needs_drafter(modes):
        raise DominoError(
            f"decode.tune measures how wide to draft, and decode.modes {', '.join(modes)} drafts nothing; add a mode"
            " that does, or take decode.tune out."
        )


def tune(
    models: Models, stop_ids: Sequence[int], settings: DecodeSettings, prompts: Sequence[Sequence[int]]
) -> tuple[DecodeSettings, list[Timed]]:
    """The settings with the fastest width, and everything that was measured, fastest first.

    Where a tree was asked for and every chain is at least as fast, the mode tree is left out.
    """
    timed = measure(models, stop_ids, settings, list(prompts[:PROBES]))
    best = timed[0].option
    changes: dict[str, Any] = {"block_size": best.block_size}
    if best.nodes:
        changes |= {"num_drafts": 0, "tree": best.tree(settings)}
    else:
        modes = tuple(mode for mode in settings.modes if mode != TREE)
        changes |= {"num_drafts": best.num_drafts, "modes": modes, "tree": None}
    return dataclasses.replace(settings, **changes), timed


def chains_of(settings: DecodeSettings, config: DrafterConfig) -> list[list[Option]]:
    """For each block size (the drafter's own and its half) the chains to use of it, the widest first."""
    chain = "domino" if config.has_head and "domino" in settings.modes else "backbone"
    found = []
    for block in (config.block_size, config.block_size // 2):
        if block < max(2, config.suffix_start + 1):
            continue
        whole = dataclasses.replace(config, block_size=block).num_drafts
        widths = [whole] + [width for width in (2**power for power in range(8, -1, -1)) if width < whole]
        found.append([Option(chain, block, width) for width in widths[:4]])
    return found


def trees_of(settings: DecodeSettings, whole: Option) -> dict[int, list[Option]]:
    """Nodes → the trees of that size to choose from, as deep as the widest chain of their block: the recipe's lanes and
    half as many, and several betas."""
    if not settings.tree:
        return {}
    room = (settings.cache_length - settings.max_new_tokens) // 2
    betas = sorted({settings.tree.beta, *BETAS}, reverse=True)
    found = {}
    for nodes in NODES:
        lanes = [lanes for lanes in (settings.tree.lanes // 2, settings.tree.lanes) if lanes]
        shapes = [(few, beta) for few in lanes if nodes <= min(whole.num_drafts * few + 1, room) for beta in betas]
        if shapes:
            found[nodes] = [Option(TREE, whole.block_size, whole.num_drafts, nodes, *shape) for shape in shapes]
    return found


def measure(
    models: Models, stop_ids: Sequence[int], settings: DecodeSettings, prompts: Sequence[Sequence[int]]
) -> list[Timed]:
    """All chains, and of every size of tree the best, on the same prompts and timed in turns; fastest first."""
    tau: dict[Option, float] = {}
    stopwatches = {}
    for chains in chains_of(settings, models.drafter.config):
        drafter = models.drafter.clone(config=shortened(models.drafter.config, chains[0].block_size))
        narrowed = models.replace(drafter=drafter)
        widest = _generator(narrowed, stop_ids, settings, chains[0])
        answers = widest.generate(prompts, chains[0].mode)
        rates = accept_rates(accept_histogram(answers, chains[0].num_drafts + 1))[0]
        own = {option: 1 + math.fsum(rates[: option.num_drafts]) for option in chains}
        own[chains[0]] = tau_pooled(answers)
        own |= _best_trees(narrowed, stop_ids, settings, prompts, answers, chains[0])
        first = prompts[: settings.batch_size]
        live = endless(widest.start(first, range(len(first))))
        for option in own:
            made = _generator(narrowed, stop_ids, settings, option)
            stopwatches[option] = round_stopwatch(made, live, option.mode)
        tau |= own
    seconds = turn_seconds(stopwatches, REPEATS)
    rates = {one: settings.batch_size * tau[one] / max(seconds[one], 1e-9) for one in tau}
    timed = [Timed(one, tau[one], seconds[one] * 1e3, rates[one]) for one in tau]
    return sorted(timed, key=lambda one: -one.tokens_per_second)


def _best_trees(models, stop_ids, settings: DecodeSettings, prompts, answers, whole: Option) -> dict[Option, float]:
    """Of each size the tree that would have emitted most per round of these answers, with how many."""
    by_nodes = trees_of(settings, whole)
    lanes = sorted({option.lanes for options in by_nodes.values() for option in options})
    recordings = {}
    for few in lanes:
        drawn = next(option for options in by_nodes.values() for option in options if option.lanes == few)
        recordings[few] = record(_generator(models, stop_ids, settings, drawn), prompts, answers, drawn.tree(settings))
    best = {}
    for options in by_nodes.values():
        found = {option: replayed_tau(recordings[option.lanes], option.tree(settings)) for option in options}
        option = max(found, key=found.get)  # of equals the one with fewer lanes
        best[option] = found[option]
    return best


def _generator(models: Models, stop_ids: Sequence[int], settings: DecodeSettings, option: Option) -> Generator:
    own = dataclasses.replace(settings, num_drafts=option.num_drafts, tree=option.tree(settings))
    return new_generator(models, stop_ids, own)


# --------------------------------------------------------------------------------------- kept in the output's folder


def tuned(
    models: Models, stop_ids: Sequence[int], settings: DecodeSettings, prompts: Sequence[Sequence[int]], file: Path
) -> tuple[DecodeSettings, Models]:
    """The settings and models of the width that is fastest here; `file` holds what was measured.

    An interrupted run goes on with the width that it began with.

    Raises:
        DataError: a damaged file of an earlier sitting.
    """
    if file.exists():
        settings = dataclasses.replace(settings, **_read_chosen(file))
    else:
        settings, timed = tune(models, stop_ids, settings, prompts)
        show(timed, len(prompts[:PROBES]))
        _write(file, settings, timed)
    drafter = models.drafter.clone(config=shortened(models.drafter.config, settings.block_size))
    return settings, models.replace(drafter=drafter)


def _write(file: Path, settings: DecodeSettings, timed: Sequence[Timed]) -> None:
    values = settings.as_json()
    figures = ("tau", "milliseconds", "tokens_per_second")
    measured = [{**dataclasses.asdict(one.option), **{name: getattr(one, name) for name in figures}} for one in timed]
    file.parent.mkdir(parents=True, exist_ok=True)
    held = {"chosen": {name: values[name] for name in CHOSEN}, "measured": measured}
    write_whole(file, json.dumps(held, indent=2) + "\n")


def _read_chosen(file: Path) -> dict[str, Any]:
    try:
        chosen = json.loads(file.read_text(encoding="utf-8"))["chosen"]
        tree = tree_from_json(chosen["tree"]) if chosen["tree"] else None
        found = {**{name: chosen[name] for name in CHOSEN}, "modes": tuple(chosen["modes"]), "tree": tree}
        numbers = [found["block_size"], found["num_drafts"], *(dataclasses.astuple(tree) if tree else ())]
        fine = all(number is None or isinstance(number, int | float) for number in numbers)
        if not fine or not set(found["modes"]) <= set(MODES) or (TREE in found["modes"]) != bool(tree):
            raise ValueError("values of other kinds")
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{file} is not what decode.tune writes; remove it, and the widths are timed again.") from error


def show(timed: Sequence[Timed], prompts: int) -> None:
    console = rich.console.Console()
    table = rich.table.Table(title=f"expected by width, acceptance recorded on {prompts} prompts")
    table.add_column("round", no_wrap=True)
    for name in ("τ", "ms a round", "tokens/s"):
        table.add_column(name, justify="right", min_width=len(name.split()[-1]))
    for one in timed:
        table.add_row(one.option.name, f"{one.tau:.2f}", f"{one.milliseconds:.2f}", f"{one.tokens_per_second:,.0f}")
    console.print(table)
