"""docs/compile_tree.md: what a tree costs beside a chain on devices that are not present, by their compilers.

    python -m benchmarks.compilers.tree --folder=/tmp/compile_tree [--only=8b]

Compiles, as decode.py does and with its shapes, the parts of a round whose draft is a tree of 16 to 128
nodes (proposal after the backbone's pass, verify, commit) and a whole round, beside the chain's head, verify of 17 rows
and round; one process and one JSON per entry; then rewrites its part of docs/compile_tree.md. No figure is a
measurement.
"""

import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.compilers import compiler_text
from benchmarks.compilers import decode as compile_decode
from benchmarks.compilers import tree_tables as compile_tree_tables
from benchmarks.compilers.decode import BLOCK, GREEDY, SLOTS, array, state_on
from benchmarks.compilers.hbm_traffic import COMPUTATION
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Models
from domino_jax.method.rounds import commit, speculative_round
from domino_jax.method.settings import DraftSettings, TreeSettings
from domino_jax.method.tree import Tree, keep_best, roll_out_lanes
from domino_jax.method.verify import Verified, accept_tree, verify
from domino_jax.models.cache import keep_path
from domino_jax.training.estimates import device_bytes

ENTRIES = (
    ("8b", "v5p", 1),
    ("8b", "h200", 1),
    ("8b", "v6e", 1),
    ("8b", "v5e", 8),
    ("4b", "v5p", 1),
    ("4b", "h200", 1),
    ("0.6b", "v5p", 1),
    ("0.6b", "h200", 1),
)
NODES = (64, 16, 32, 128)  # in the order of compiling
KV = ("k_proj", "v_proj")
CHAIN = ("head", "verify17", "round")
PROGRAMS = len(CHAIN) + 3 * len(NODES) + 1


def drafting(nodes: int) -> DraftSettings:
    """As the recipes' decode.tree."""
    return DraftSettings(scale=float("inf"), tree=TreeSettings(nodes=nodes, lanes=16, candidates=64))


# ------------------------------------------------------------------------------------------------------ programs


def programs(mesh: Mesh, models: Models) -> dict[str, tuple]:
    """name → (function, arguments); argument 1 is donated, but a drafted block, which no result can reuse.

    A program's function is called as the program is: the compilers' files are found by it.
    """
    chain = compile_decode.programs(mesh, models)
    found = {label: chain[label] for label in CHAIN[:2]}
    for nodes in NODES:
        for label, function, arguments in parts(mesh, models, nodes):
            function.__name__ = label
            found[label] = (function, arguments)

    def round_tree64(models, state, stop):
        return speculative_round(models, state, stop, GREEDY, drafting(64))

    _, arguments = chain["round"]
    return found | {"round_tree64": (round_tree64, arguments), "round": chain["round"]}


def parts(mesh: Mesh, models: Models, nodes: int) -> list[tuple]:
    """(name, function, arguments) of a tree's round in parts: its proposal from z and base logits, verify, commit.

    Together with the backbone's pass they are rounds.tree_round.
    """
    state = state_on(mesh, models)
    config, settings = models.drafter.config, drafting(nodes)
    deepest = settings.width(config)
    bare = state.replace(target_cache=(), draft_cache=())

    def tree(models, drafted, state):
        shape = settings.tree
        ledger = roll_out_lanes(models, state, *drafted, GREEDY, settings)
        return keep_best(state.anchors, ledger, shape.lanes, shape.nodes, shape.beta)

    def check(models, cache, tree, lengths):
        shape = {"depths": tree.depths, "ancestors": tree.ancestors, "tap_layers": config.target_layer_ids}
        out = verify(models, cache, tree.tokens, lengths, **shape)
        return jnp.argmax(out.logits, -1).astype(jnp.int32), out.features, out.cache

    def conclude(models, caches, verified, tree, state, stop):
        (target_cache, draft_cache), (chosen, features) = caches, verified
        accepted, path = accept_tree(tree.tokens, chosen, tree.depths, tree.parents, tree.ancestors, deepest)
        of_path = jnp.take_along_axis(features, path[:, :, None], axis=1)
        out = Verified(None, of_path, keep_path(target_cache, state.lengths, path, tree.tokens.shape[1]))
        emitted = jnp.take_along_axis(chosen, path, axis=1)
        return commit(models, state, out, draft_cache, emitted, accepted, stop)

    drafted = compile_decode.programs(mesh, models)["head"][1][1]
    row = array(mesh, 1, nodes)
    made = Tree(row, row, row, array(mesh, 1, nodes, nodes, dtype=bool))
    features = array(mesh, 1, nodes, len(config.target_layer_ids) * config.hidden_size, dtype=jnp.bfloat16)
    caches = (state.target_cache, state.draft_cache)
    return [
        (f"tree{nodes}", tree, (models, drafted, bare)),
        (f"verify{nodes}", check, (models, state.target_cache, made, state.lengths)),
        (f"commit{nodes}", conclude, (models, caches, (row, features), made, bare, array(mesh, 1))),
    ]


def must_move(models: Models, state: DecodeState) -> dict[str, int]:
    """A lower bound on the bytes that a part moves on one chip, counted as in compile_decode.must_move.

    A tree's proposal reads the base logits, the GRU and the head's first product once, and the columns of at least one
    depth's candidates. A commit may find its path in place already; it fuses the features into one row or more.
    """
    per_chip = device_bytes
    found = compile_decode.must_move(models, state)
    config, cache = models.drafter.config, per_chip(state.target_cache)
    backbone, head = models.drafter_params["backbone"], models.drafter_params["head"]
    columns = drafting(64).tree.candidates * 2 * config.emb_dim
    tree = 4 * config.num_drafts * config.vocab_size + per_chip([head["down"], head["gru"]]) + columns
    kv = per_chip([part["self_attn"][name] for part in backbone.values() if "self_attn" in part for name in KV])
    commit = compile_decode.fusion_bytes(models) + kv + per_chip(state.draft_cache) // SLOTS
    for nodes in NODES:
        found[f"tree{nodes}"] = tree
        found[f"verify{nodes}"] = found["step"] + (nodes - 1) * cache // SLOTS
        found[f"commit{nodes}"] = commit
    return found


# --------------------------------------------------------------------------------------------- read from the text

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_WHILE = re.compile(r" while\(.*body=%?([\w.\-]+)")


def turned_cycles(text: str, trips: int) -> int | None:
    """compiler_text.cycles, but loop bodies as often as they run; else None.

    trips: of the program's one loop over depths.
    """
    own: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        opened = COMPUTATION.match(line)
        lines = own.setdefault("ENTRY" if opened[1] else opened[2], []) if opened else lines
        lines.append(line)

    def of(name: str) -> int:
        body = own[name]
        counted = sum(int(count) for line in body for count in _CYCLES.findall(line))
        return counted + trips * sum(of(found[1]) for found in map(_WHILE.search, body) if found)

    return of("ENTRY") or None


def add_turns(found: dict, label: str, program: jax.stages.Compiled) -> None:
    """Cost of the loop over depths in all its iterations, by program: cycles on a TPU, launches on a GPU."""
    if not label.startswith(("head", "tree", "round", "commit64")):
        return
    made, trips = found["programs"][label], BLOCK if "tree" in label else BLOCK - 1
    made["turned_cycles"] = turned_cycles(program.as_text(), trips)
    listed = compile_decode.thunks(label)
    if listed:
        made["launches"] = compiler_text.launches(compile_decode.wrapped(listed), trips=trips)


DUMPED = "(head|tree|commit64|round)"
WORK = compile_decode.Work("benchmarks.compilers.tree", ENTRIES, PROGRAMS, programs, must_move, add_turns, DUMPED)

if __name__ == "__main__":
    compile_decode.run(WORK, compile_tree_tables, __doc__.splitlines()[0])
