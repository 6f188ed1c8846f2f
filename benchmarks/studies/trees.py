"""τ of trees by nodes, candidates, lanes and beta beside the chain's, over the same answers (docs/decoding.md).

    python -m benchmarks.studies.trees --config=configs/tiny.py --config.decode.num_drafts=0
    python -m benchmarks.studies.trees --config=configs/tiny.py --config.decode.num_prompts=1 \\
        --config.decode.max_new_tokens=8                                             # a test of the command

Set --config.decode.temperature=1.0 for another temperature.

Decodes 2 · decode.num_prompts prompts with the chain (mode draft) and replays every tree over the answers
(tree_replay.py). Candidates, lanes and beta are chosen on the second half of the prompts and measured on the first
half. Prints Markdown.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from benchmarks.studies.tree_replay import record, replayed_tau
from benchmarks.tables import markdown
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decoding.acceptance import tau_pooled
from domino_jax.decoding.generate import new_generator
from domino_jax.method.pair import Models
from domino_jax.method.settings import DRAFT, TREE, DecodeSettings, TreeSettings
from domino_jax.recipe import cli, rules
from domino_jax.recipe.values import decode_settings
from domino_jax.runtime.errors import DominoError
from domino_jax.weights.loading import load_models, load_target

NODES = (16, 32, 64, 128)
LANES = (8, 12, 16, 24)
BETAS = (0.0, -0.1, -0.2, -0.3, -0.5)
CANDIDATES = (64, None)  # None: the whole vocabulary
COLUMNS = {"nodes": "nodes", "candidates": "candidates", "lanes": "lanes", "beta": "beta", "tau": "τ"}
COLUMNS |= {"gain": "τ ÷ chain's", "least": "least of all settings", "most": "most"}


def main(flags: cli.Flags) -> None:
    config = flags.config
    config.decode.modes = (DRAFT, TREE)
    rules.check(config, "decode")
    settings = decode_settings(config.decode, config.drafter.head)
    rows = read_rows(config.eval.prompts, config.decode.num_prompts)
    loaded = load_target(config.target.path, settings.dtype)
    models = load_models(loaded, config.drafter.path)
    prompts = [encode_prompt(loaded.tokenizer, row, settings.thinking, f"prompt {row['id']}") for row in rows]
    show(models, loaded.stop_ids, settings, prompts)


def read_rows(path: str, count: int) -> list[dict[str, Any]]:
    """Twice `count` prompt rows; all of them, but for an odd one, when it is 0."""
    rows = read_prompts(path, 2 * count or None)
    wanted = 2 * count or max(2, len(rows) // 2 * 2)
    if len(rows) < wanted:
        raise DominoError(
            f"{path} has {len(rows)} prompts, and the sweep reads {wanted}, one half to pick on and one to measure on:"
            " lower config.decode.num_prompts, or name a longer file."
        )
    return rows[:wanted]


def show(models: Models, stop_ids: Sequence[int], settings: DecodeSettings, prompts: Sequence[Sequence[int]]) -> None:
    """Prints the chain's τ and the tables; measured on the first half of the prompts, picked on the second."""
    chain = new_generator(models, settings.change(tree=None), stop_ids)
    answers = chain.generate(models, prompts, DRAFT).answers
    measured = answers[: len(prompts) // 2]
    tau = tau_pooled(measured)
    full = chain.drafting(DRAFT).width(models.drafter.config) + 1
    capped = [emitted == full for answer in measured for emitted in answer.accept_lengths]
    print(f"chain: τ {tau:.3f}, {sum(capped) / len(capped):.0%} of rounds full ({full} tokens)", flush=True)
    print(markdown(rows_of(sweep(models, stop_ids, settings, prompts, answers), tau), COLUMNS), flush=True)


def sweep(models: Models, stop_ids, settings: DecodeSettings, prompts, answers) -> dict[TreeSettings, tuple]:
    """Tree → τ on the first half of the prompts and on the second."""
    taus, half, vocab = {}, len(prompts) // 2, models.target.config.vocab_size
    sizes = sorted({min(count or vocab, vocab) for count in CANDIDATES})
    for candidates, lanes in itertools.product(sizes, LANES):
        # The record has all nodes that lanes meet; the replay decides how many of them a tree keeps.
        drawn = dataclasses.replace(settings.drafting.tree, nodes=2, lanes=lanes, candidates=candidates)
        generator = new_generator(models, settings.change(tree=drawn), stop_ids)
        recordings = record(models, generator, prompts, answers)
        for nodes, beta in itertools.product(NODES, BETAS):
            if nodes <= recordings[0].ledger.tokens.shape[1] + 1:
                tree = dataclasses.replace(drawn, nodes=nodes, beta=beta)
                taus[tree] = tuple(replayed_tau(part, tree) for part in (recordings[:half], recordings[half:]))
    return taus


def rows_of(taus: dict[TreeSettings, tuple], chain: float) -> list[dict[str, Any]]:
    """For each number of nodes the tree that was picked, and how much the settings matter."""
    rows = []
    for nodes in NODES:
        some = {tree: both for tree, both in taus.items() if tree.nodes == nodes}
        if some:
            best = max(some, key=lambda tree: some[tree][1])
            span = [both[0] / chain for both in some.values()]
            shape = {"nodes": nodes, "candidates": best.candidates, "lanes": best.lanes, "beta": best.beta}
            tau = some[best][0]
            rows.append(shape | {"tau": tau, "gain": tau / chain, "least": min(span), "most": max(span)})
    return rows


if __name__ == "__main__":
    cli.run(main, required=("config",))
