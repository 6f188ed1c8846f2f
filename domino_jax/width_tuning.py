"""Which width is fastest on this device: the draft block, how many tokens of it are verified, a tree (decode.tune).

A wider round emits more tokens and takes longer. How many more is a matter of the drafter and the prompts, and is
recorded from a few of them; how much longer is a matter of the device, and is timed. The product is the expected rate.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table

from domino_jax.decode_settings import DecodeSettings, new_generator
from domino_jax.decoding.generate import TREE, Generator
from domino_jax.decoding.measure import accept_histogram, accept_rates, tau_pooled
from domino_jax.decoding.models import Models
from domino_jax.decoding.round_times import endless, round_stopwatch, turn_seconds
from domino_jax.drafter.config import DrafterConfig
from domino_jax.loading import shortened

PROBES = 8  # prompts that acceptance is recorded on
NODES = (16, 32, 64, 128)
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to run a round; nodes is 0 for a chain."""

    mode: str
    block_size: int
    num_drafts: int
    nodes: int = 0

    @property
    def name(self) -> str:
        what = f"tree of {self.nodes}" if self.nodes else f"{self.num_drafts} drafts"
        return f"{self.mode}, block {self.block_size}, {what}"


@dataclasses.dataclass(frozen=True)
class Timed:
    """tau: expected tokens of a round, from recorded acceptance.  milliseconds: of a round, median."""

    option: Option
    tau: float
    milliseconds: float
    tokens_per_second: float


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
        changes |= {"num_drafts": 0, "tree": dataclasses.replace(settings.tree, nodes=best.nodes)}
    else:
        modes = tuple(mode for mode in settings.modes if mode != TREE)
        changes |= {"num_drafts": best.num_drafts, "modes": modes, "tree": None}
    return dataclasses.replace(settings, **changes), timed


def options_of(settings: DecodeSettings, config: DrafterConfig) -> list[list[Option]]:
    """For each block size (the drafter's own and its half) the ways to use it, the widest chain first."""
    chain = "domino" if config.has_head and "domino" in settings.modes else "backbone"
    found = []
    for block in (config.block_size, config.block_size // 2):
        if block < max(2, config.suffix_start + 1):
            continue
        whole = dataclasses.replace(config, block_size=block).num_drafts
        widths = [whole] + [width for width in (2**power for power in range(8, -1, -1)) if width < whole]
        options = [Option(chain, block, width) for width in widths[:4]]
        if settings.tree:
            most = whole * settings.tree.lanes + 1
            room = settings.cache_length - settings.max_new_tokens
            options += [Option(TREE, block, whole, nodes) for nodes in NODES if nodes <= min(most, room // 2)]
        found.append(options)
    return found


def measure(
    models: Models, stop_ids: Sequence[int], settings: DecodeSettings, prompts: Sequence[Sequence[int]]
) -> list[Timed]:
    """All options on the same prompts, timed in turns; fastest first."""
    tau: dict[Option, float] = {}
    stopwatches = {}
    for options in options_of(settings, models.drafter.config):
        drafter = models.drafter.clone(config=shortened(models.drafter.config, options[0].block_size))
        narrowed = models.replace(drafter=drafter)
        rates: list[float] = []
        live = None
        for option in options:
            made = _generator(narrowed, stop_ids, settings, option)
            if option.nodes or not rates:
                answers = made.generate(prompts, option.mode)
                tau[option] = tau_pooled(answers)
            if not option.nodes:
                rates = rates or accept_rates(accept_histogram(answers, option.num_drafts + 1))[0]
                tau[option] = 1 + math.fsum(rates[: option.num_drafts])
            if live is None:
                first = prompts[: settings.batch_size]
                live = endless(made.start(first, range(len(first))))
            stopwatches[option] = round_stopwatch(made, live, option.mode)
    seconds = turn_seconds(stopwatches, REPEATS)
    rates = {one: settings.batch_size * tau[one] / max(seconds[one], 1e-9) for one in tau}
    timed = [Timed(one, tau[one], seconds[one] * 1e3, rates[one]) for one in tau]
    return sorted(timed, key=lambda one: -one.tokens_per_second)


def _generator(models: Models, stop_ids: Sequence[int], settings: DecodeSettings, option: Option) -> Generator:
    tree = dataclasses.replace(settings.tree, nodes=option.nodes) if option.nodes else None
    own = dataclasses.replace(settings, num_drafts=option.num_drafts, tree=tree)
    return new_generator(models, stop_ids, own)


def as_json(timed: Sequence[Timed]) -> list[Mapping[str, Any]]:
    return [
        {**dataclasses.asdict(one.option), **{k: v for k, v in vars(one).items() if k != "option"}} for one in timed
    ]


def show(timed: Sequence[Timed], prompts: int) -> None:
    console = rich.console.Console()
    table = rich.table.Table(title=f"expected by width, acceptance recorded on {prompts} prompts")
    table.add_column("round", no_wrap=True)
    for name in ("τ", "ms a round", "tokens/s"):
        table.add_column(name, justify="right")
    for one in timed:
        table.add_row(one.option.name, f"{one.tau:.2f}", f"{one.milliseconds:.2f}", f"{one.tokens_per_second:,.0f}")
    console.print(table)
