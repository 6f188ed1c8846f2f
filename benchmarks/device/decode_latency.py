"""Milliseconds of the parts of decoding at a model shape, with random weights: what a round costs does not depend
on the drafts that it accepts.

    python -m benchmarks.device.decode_latency --size=8b --output=8b.json      # a GPU or TPU
    python -m benchmarks.device.decode_latency --small                         # a test of the command, on any CPU

An autoregressive step, the draft, the head's rollout, verify of 17 and of 16 to 128 rows, the tree's proposal and round
at those sizes, the commit, a whole round; each many times inside one jitted loop, alternating, as medians. Beside each
time are the bytes that must be moved, and the time that the bandwidth of a copy allows, measured in the same run. The
texts are meaningless.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from benchmarks.compilers.programs import CANDIDATES, fusion_bytes, must_move
from benchmarks.device.random_models import decoding_models, state_of
from benchmarks.tables import markdown
from domino_jax.decoding.generate import Generator, new_generator
from domino_jax.decoding.settings import BACKBONE, BASELINE, DOMINO, TREE, DecodeSettings
from domino_jax.evals.round_times import (
    endless,
    round_of,
    round_stopwatch,
    round_stopwatches,
    stopwatch,
    turn_seconds,
)
from domino_jax.method.loop import DecodeState
from domino_jax.method.pair import Pair
from domino_jax.method.settings import DraftSettings, SamplingParams, TreeSettings
from domino_jax.method.tree import propose_tree
from domino_jax.method.verify import verify
from domino_jax.runtime.sizes import device_bytes
from domino_jax.weights import loading

GREEDY = SamplingParams()
NAMES = {round_of(BASELINE): "step", round_of(DOMINO): "round", round_of(BACKBONE): "round_without_head"}
COMPILING = 8  # programs that are compiled at a time

Stopwatch = Callable[[int], float]  # turns → seconds


def copy_stopwatch(megabytes: int) -> tuple[Callable[[int], float], int]:
    """turns → seconds of that many copies of an array, and the bytes that one of them reads and writes."""
    x = jnp.ones(megabytes * 2**20 // 2, jnp.bfloat16)

    def copies(x, turns):
        return jax.lax.fori_loop(0, turns, lambda _, x: jax.lax.optimization_barrier(x + 1), x)

    return stopwatch(jax.jit(copies), x), 2 * x.nbytes


def looped(part, carry_of, models: Pair, state: DecodeState) -> Stopwatch:
    """The time of a jitted loop that runs part(models, state, carry) → carry."""

    @jax.jit
    def program(models, state, turns):
        return jax.lax.fori_loop(0, turns, lambda _, carry: part(models, state, carry), carry_of(state))

    return stopwatch(program, models, state)


def checked(models: Pair, state: DecodeState, rows: int) -> Stopwatch:
    """verify of `rows` rows and its choices, as a round uses them."""

    def part(models, state: DecodeState, carry):
        tokens, cache = carry
        taps = models.drafter.config.target_layer_ids
        out = verify(models, cache, tokens, state.lengths, tap_layers=taps)
        nothing = (1e-30 * out.features.sum()).astype(jnp.int32)  # uses the features; their sum is below a token id
        return jnp.argmax(out.logits, -1).astype(jnp.int32) + nothing, out.cache

    def begin(state):
        return jnp.broadcast_to(state.anchors[:, None], (len(state.anchors), rows)), state.target_cache

    return looped(part, begin, models, state)


def proposed(models: Pair, state: DecodeState, tree: TreeSettings) -> Stopwatch:
    """A tree: backbone, candidates, head and all."""
    settings = DraftSettings(draft_sharpness=float("inf"), tree=tree)

    def part(models, state: DecodeState, carry):
        anchors, cache = carry
        tree, cache = propose_tree(models, state.replace(anchors=anchors, draft_cache=cache), GREEDY, settings)
        return tree.tokens[:, -1], cache

    return looped(part, lambda state: (state.anchors, state.draft_cache), models, state)


def chain_stopwatches(models: Pair, generator: Generator, state: DecodeState) -> dict[str, Stopwatch]:
    """A step, a round with and without the head, and a round's parts but for verify, which has its own widths."""
    timed = round_stopwatches(models, generator, state, (BASELINE, BACKBONE, DOMINO))
    return {NAMES.get(name, name): seconds for name, seconds in timed.items() if name != "verify"}


def tree_stopwatches(
    models: Pair, settings: DecodeSettings, state: DecodeState, trees: list[TreeSettings]
) -> dict[str, Stopwatch]:
    """The proposal and the whole round of each tree."""
    timed = {f"propose_tree({tree.nodes})": proposed(models, state, tree) for tree in trees}
    for tree in trees:
        drafting = DraftSettings(tree=tree)
        generator = new_generator(models, settings.change(drafting=drafting))
        timed[f"round_tree({tree.nodes})"] = round_stopwatch(models, generator, endless(state), TREE)
    return timed


def median_seconds(timed: Mapping[str, Stopwatch], repeats: int) -> dict[str, float]:
    """turn_seconds, after one call of each in threads: compilers work outside of Python's lock."""
    with concurrent.futures.ThreadPoolExecutor(min(COMPILING, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda seconds: seconds(1), timed.values()))
    return turn_seconds(timed, repeats)


def rate(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None  # None: too fast to be timed


def measure(choices: argparse.Namespace) -> dict:
    """Median seconds of every part, the bytes that each must move, and the copy's bytes per second."""
    loading.use_exact_matmuls(choices.dtype)
    models = decoding_models(choices.size, choices.dtype, choices.layers, choices.head)
    settings = DecodeSettings(
        cache_length=choices.slots,
        smallest_cache=choices.slots,
        max_new_tokens=choices.slots // 4,
        drafting=DraftSettings(head_candidates=choices.candidates),
    )
    generator = new_generator(models, settings)
    state = state_of(models, generator, 1, choices.slots, choices.slots // 4)
    copy, copied = copy_stopwatch(choices.copy_megabytes)
    timed = {"copy": copy} | chain_stopwatches(models, generator, state)
    timed |= {f"verify({rows})": checked(models, state, rows) for rows in sorted({17, *choices.widths})}
    timed |= tree_stopwatches(models, settings, state, [TreeSettings(nodes=nodes) for nodes in choices.trees])
    seconds = median_seconds(timed, choices.repeats)
    bandwidth = rate(copied, seconds.pop("copy"))
    return {
        "seconds": seconds,
        "must": must_bytes(models, state, seconds, choices.candidates),
        "copy_bytes_per_second": bandwidth,
    }


def must_bytes(models: Pair, state: DecodeState, names, candidates: int = CANDIDATES[0]) -> dict[str, int]:
    """Bytes that a part must move (programs.must_move); verify of more rows differs by the rows it writes.

    candidates: of the head, one of CANDIDATES or 0.
    """
    must = must_move(models, state)
    if candidates:
        must |= {part: must[f"{part}{candidates}"] for part in ("head", "round")}
    row = (must["verify64"] - must["verify17"]) // 47
    for name in names:
        rows = int(name.split("(")[1][:-1]) if name.endswith(")") else 0
        if name.startswith("verify("):
            must[name] = must["step"] + (rows - 1) * row
        elif name.startswith("round_tree("):
            must[name] = must["round"] + (rows - 17) * row
    backbone = models.drafter_params["backbone"]
    context = [
        backbone[name]["self_attn"][part] for name in backbone if "layer" in name for part in ("k_proj", "v_proj")
    ]
    must["commit"] = fusion_bytes(models) + device_bytes(context)
    return {name: must[name] for name in names if name in must}


def timed(seconds: float, must: int | None, copied: float | None) -> dict[str, float | None]:
    """Milliseconds, the bytes that must be moved, and the milliseconds that the copy's bandwidth allows for them."""
    limit = must / copied if must and copied else None
    ratio = seconds / limit if limit else None
    return {"ms": seconds * 1e3, "must_bytes": must, "limit_ms": limit and limit * 1e3, "of_limit": ratio}


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="8b", help="small, tiny, 0.6b, 1.7b, 4b, 8b, 14b or 32b")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    numbers = (("slots", 4096), ("layers", 5), ("repeats", 7), ("copy-megabytes", 1024))
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 32, 64, 128], help="rows of verify")
    parser.add_argument("--trees", type=int, nargs="*", help="nodes of trees; without it the same as --widths")
    parser.add_argument(
        "--candidates",
        type=int,
        choices=(*CANDIDATES, 0),
        default=CANDIDATES[0],
        help="tokens per slot that the head corrects, as decode.head_candidates",
    )
    parser.add_argument("--head", type=int, nargs=2, default=[256, 1024], help="emb_dim and gru_hidden_dim")
    parser.add_argument("--small", action="store_true", help="three narrow layers in float32")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write as well")
    choices = parser.parse_args(argv)
    if choices.small:
        small = {"size": "small", "dtype": "float32", "slots": 64, "layers": 1, "repeats": 1, "copy_megabytes": 1}
        for name, value in (small | {"widths": [4], "trees": [4], "head": [8, 8]}).items():
            setattr(choices, name, value)
    choices.trees = choices.widths if choices.trees is None else choices.trees
    return choices


def main(argv: list[str] | None = None) -> None:
    choices = parsed(argv)
    measured = measure(choices)
    copied, seconds = measured["copy_bytes_per_second"], measured["seconds"]
    parts = {name: timed(spent, measured["must"].get(name), copied) for name, spent in seconds.items()}
    columns = {"part": "part", "ms": "ms", "must_bytes": "must move, bytes", "of_limit": "× its limit"}
    print(markdown([{"part": name, **part} for name, part in parts.items()], columns), flush=True)
    if choices.output:
        device = jax.devices()[0].device_kind
        record = {"device": device, "jax": jax.__version__, "copy_bytes_per_second": copied, "parts": parts}
        choices.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
