"""Tune how drafts share the target's noise at one temperature, and store it with the drafter.

    python -m domino_jax.tune --config=configs/tiny.py --config.decode.temperature=1.0

At temperature > 0 a draft is argmax(c·log q + g): with a large c the greedy draft, with c = 1 coupled with the target's
own noise (DESIGN §4). Which is best depends on how well q fits p, so it is measured: held-out prompts are decoded with
the greedy draft, with several c, and with a draft sampled apart from the target. With mode tree in decode.modes c and
spread of a coupled tree (TREE.md §4 step 3) are measured beside the tree that is not coupled. The text is the same each
time; τ is not. The best goes into <drafter>/decoding.json, where `decode` finds it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import rich.console
import rich.table

from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.generate import TREE, Generator
from domino_jax.decoding.measure import tau_pooled
from domino_jax.decoding.propose import DraftSettings, TreeSettings
from domino_jax.decoding.sampling import SamplingParams
from domino_jax.decoding.tuned_constants import CHAINS, FILE, TREES, Coupling, check_writable, store
from domino_jax.drafters.pair import Models
from domino_jax.recipe import checks as recipes
from domino_jax.recipe import cli
from domino_jax.runtime.errors import DominoError
from domino_jax.runtime.files import is_remote
from domino_jax.runtime.progress import Progress
from domino_jax.weights import hf
from domino_jax.weights.loading import load_models, load_target

SCALES = (0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0)
TREE_SCALES = (1.0, 2.0, 3.0, 5.0)
SPREADS = (1.0, 2.0, 3.0)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to draft; own_noise: sampled apart from the target's choice."""

    kind: str  # CHAINS or TREES
    coupling: Coupling = Coupling()
    own_noise: bool = False

    @property
    def name(self) -> str:
        scale = self.coupling.draft_scale
        if self.own_noise:
            return "sampled apart"
        if math.isinf(scale):
            return "greedy" if self.kind == CHAINS else "tree, not coupled"
        chain = f"coupled, c = {scale:g}"
        return chain if self.kind == CHAINS else f"tree, {chain}, spread {self.coupling.spread:g}"

    def drafting(self, num_drafts: int | None, tree: TreeSettings | None) -> DraftSettings:
        """As the recipe has it otherwise."""
        if self.kind == CHAINS:
            return DraftSettings(scale=self.coupling.draft_scale, own_noise=self.own_noise, num_drafts=num_drafts)
        return DraftSettings(num_drafts=num_drafts, tree=dataclasses.replace(tree, **dataclasses.asdict(self.coupling)))


def main(flags: cli.Flags) -> None:
    config = flags.config
    recipes.check(config, "decode")
    decode = config.decode
    sampling = SamplingParams(decode.temperature, decode.top_k, decode.top_p, decode.min_p)
    if sampling.greedy:
        raise DominoError(
            "config.decode.temperature is 0: a greedy choice has no noise to share; name the temperature to tune for,"
            " as --config.decode.temperature=1.0."
        )
    if is_remote(config.drafter.path or ""):
        raise DominoError(
            f"config.drafter.path is {config.drafter.path}, and constants are stored with a local drafter only;"
            " copy the folder here first."
        )
    source = flags.prompts or decode.prompts or config.eval.prompts
    if not source:
        raise DominoError("there are no prompts: give --prompts=FILE.jsonl or set config.decode.prompts.")
    modes = tuned_modes(decode.modes)
    loaded = load_target(config.target.path, decode.dtype)
    models = load_models(loaded, config.drafter.path, modes, block_size=decode.block_size)
    rows = read_prompts(source, decode.num_prompts or None)
    prompts = [encode_prompt(loaded.tokenizer, row, decode.thinking, f"prompt {row['id']}") for row in rows]
    settings = {
        "stop_ids": (*(() if decode.ignore_eos else loaded.stop_ids), *decode.stop_ids),
        "cache_slots": decode.cache_length,
        "max_new_tokens": decode.max_new_tokens,
        "batch_size": decode.batch_size,
        "seed": decode.seed,
        "sampling": sampling,
    }
    drafts, tree, folder = (
        decode.num_drafts or None,
        TreeSettings(**decode.tree),
        hf.drafter_folder(config.drafter.path),
    )
    check_writable(folder)
    for mode in modes:
        ways = ways_of(mode)
        tried = measure(models, prompts, mode, {way: way.drafting(drafts, tree) for way in ways}, settings)
        best = max((way for way in ways if not way.own_noise), key=tried.get)
        show(tried, best, f"{len(prompts)} prompts, temperature {sampling.temperature:g}, {mode}, {decode.dtype}")
        store(folder, best.kind, sampling, best.coupling, tried[best], len(prompts))
    print(f"stored in {folder / FILE}: decode takes it where the recipe sets no draft_scale of that kind.")


def tuned_modes(modes: Sequence[str]) -> tuple[str, ...]:
    """What there is to tune: one kind of chain, the tree, or both; the backbone's chain where nothing drafts."""
    chains = [mode for mode in ("domino", "backbone") if mode in modes]
    trees = [TREE] if TREE in modes else []
    return (*chains[:1], *trees) or ("backbone",)


def ways_of(mode: str) -> list[Way]:
    """The draft without noise, with every constant, and for chains the draft that shares nothing."""
    if mode == TREE:
        return [Way(TREES), *(Way(TREES, Coupling(*both)) for both in itertools.product(TREE_SCALES, SPREADS))]
    return [Way(CHAINS), *(Way(CHAINS, Coupling(scale)) for scale in SCALES), Way(CHAINS, Coupling(1.0), True)]


def measure(
    models: Models, prompts: Sequence[Sequence[int]], mode: str, drafting: Mapping[Way, DraftSettings], settings: dict
) -> dict[Way, float]:
    """τ of each way to draft; the texts are the same each time but for near ties, which are told.

    settings: of the generator, but for how it drafts.
    """
    tried, texts = {}, None
    with Progress("tune", total=len(drafting)) as progress:
        for way, own in drafting.items():
            answers = Generator(models, drafting=own, **settings).generate(prompts, mode)
            tried[way] = tau_pooled(answers)
            texts = texts or [answer.token_ids for answer in answers]
            parted = sum(text != answer.token_ids for text, answer in zip(texts, answers, strict=True))
            progress.advance(1, f"{way.name}: τ {tried[way]:.2f}" + f", {parted} texts parted" * bool(parted))
    return tried


def show(tried: Mapping[Way, float], best: Way, title: str) -> None:
    console = rich.console.Console()
    table = rich.table.Table()
    table.add_column("draft")
    table.add_column("τ pooled", justify="right")
    for way, tau in tried.items():
        table.add_row(way.name + (" (best)" if way is best else ""), f"{tau:.2f}")
    console.print(title, highlight=False)
    console.print(table)


if __name__ == "__main__":
    cli.run(main, required=("config",), optional=("prompts",))
