"""τ of trees by nodes, lanes and beta beside the chain's, over the same answers: the tables of docs/tree.md.

    python -m benchmarks.tree_sweep --config=configs/tiny.py [--config.decode.temperature=1.0]

Decodes twice decode.num_prompts prompts with the chain and replays every tree over the answers
(domino_jax/tree_replay.py). Lanes and beta are picked on the second half of the prompts; what is printed as measured is
the first half, with what was picked. Prints Markdown.
"""

import dataclasses
import itertools

from domino_jax import cli
from domino_jax import config as recipes
from domino_jax.data.chat import encode_prompt
from domino_jax.data.prompts import read_prompts
from domino_jax.decode_settings import DecodeSettings, decode_settings, new_generator
from domino_jax.decoding.measure import tau_pooled
from domino_jax.decoding.propose import TreeSettings
from domino_jax.errors import DominoError
from domino_jax.loading import load_models, load_target
from domino_jax.tree_replay import record, replayed_tau

NODES = (16, 32, 64, 128)
LANES = (8, 12, 16, 24)
BETAS = (0.0, -0.1, -0.2, -0.3, -0.5)


def main(flags: cli.Flags) -> None:
    config = flags.config
    config.decode.modes = ("domino", "tree")
    recipes.check(config, "decode")
    settings = decode_settings(config.decode)
    loaded = load_target(config.target.path, settings.dtype)
    models = load_models(loaded, config.drafter.path, settings.modes, block_size=settings.block_size)
    count = config.decode.num_prompts
    rows = read_prompts(config.decode.prompts, 2 * count)
    if len(rows) < 2 * count:
        raise DominoError(f"{config.decode.prompts} has {len(rows)} prompts; set decode.num_prompts to half of that.")
    prompts = [encode_prompt(loaded.tokenizer, row, settings.thinking, f"prompt {row['id']}") for row in rows]
    chain = new_generator(models, loaded.stop_ids, dataclasses.replace(settings, tree=None))
    answers = chain.generate(prompts, "domino")
    tau = tau_pooled(answers[:count])
    full = chain.settings("domino").width(models.drafter.config) + 1
    capped = [emitted == full for answer in answers[:count] for emitted in answer.accept_lengths]
    print(f"chain: τ {tau:.3f}, {sum(capped) / len(capped):.0%} of rounds full ({full} tokens)", flush=True)
    found = sweep(models, loaded.stop_ids, settings, prompts, answers, count)
    tables(found, tau)


def sweep(models, stop_ids, settings: DecodeSettings, prompts, answers, count: int) -> dict[TreeSettings, tuple]:
    """Tree → τ on the first `count` prompts and on the others."""
    found = {}
    for lanes in LANES:
        drawn = dataclasses.replace(settings.tree, lanes=lanes)
        made = new_generator(models, stop_ids, dataclasses.replace(settings, tree=drawn))
        recordings = record(made, prompts, answers, lanes)
        for nodes, beta in itertools.product(NODES, BETAS):
            if nodes <= recordings[0].ledger.tokens.shape[1] + 1:
                tree = dataclasses.replace(drawn, nodes=nodes, beta=beta)
                found[tree] = tuple(replayed_tau(half, tree) for half in (recordings[:count], recordings[count:]))
    return found


def tables(found: dict[TreeSettings, tuple], chain: float) -> None:
    """What was picked, and how much each setting matters."""
    print(
        "\n| nodes | picked: lanes, beta | τ | × chain | least and most of all lanes and betas |\n|---|---|---|---|---|"
    )
    for nodes in NODES:
        some = {tree: both for tree, both in found.items() if tree.nodes == nodes}
        if some:
            best = max(some, key=lambda tree: some[tree][1])
            span = [both[0] / chain for both in some.values()]
            tau = some[best][0]
            shares = f"{min(span):.3f} to {max(span):.3f}"
            line(nodes, f"{best.lanes}, {best.beta:g}", f"{tau:.3f}", f"{tau / chain:.3f}", shares)
    line("nodes", "lanes", *(f"beta {beta:g}" for beta in BETAS), head=True)
    for nodes, lanes in itertools.product(NODES, LANES):
        row = [both[0] / chain for tree, both in found.items() if (tree.nodes, tree.lanes) == (nodes, lanes)]
        if row:
            line(nodes, lanes, *(f"{ratio:.3f}" for ratio in row))


def line(*cells, head: bool = False) -> None:
    print(("\n" if head else "") + "| " + " | ".join(map(str, cells)) + " |")
    if head:
        print("|---" * len(cells) + "|")


if __name__ == "__main__":
    cli.run(main, required=("config",))
