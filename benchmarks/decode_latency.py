"""Milliseconds of the parts of decoding at a model shape, with random weights and a forced acceptance length.

    python -m benchmarks.decode_latency --size=8b --output=8b.json      # a GPU or TPU
    python -m benchmarks.decode_latency --cpu-tiny                      # a minute on any CPU, float32

An autoregressive step, the draft, the head's rollout, verify of 17 and of 16 to 128 rows, the tree's proposal and round
at those sizes, the commit, a whole round; each many times inside one jitted loop, alternating, as medians. Beside each
the bytes that it must move, and on a device of a known kind the time that its bandwidth allows; the copy bandwidth of
the device is measured in the same run. The texts mean nothing: the speed-up is the shape's at the given τ.
"""

import argparse
import datetime
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compile_decode import must_move
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.loop import DecodeState
from domino_jax.decoding.settings import DraftSettings, GeneratorSettings, SamplingParams, TreeSettings
from domino_jax.decoding.tree import propose_tree
from domino_jax.decoding.verify import verify
from domino_jax.drafters.config import DrafterConfig
from domino_jax.evals.round_times import copy_stopwatch, round_split, turn_seconds
from domino_jax.models.qwen3 import Qwen3
from domino_jax.training import topologies
from domino_jax.weights import loading, random_weights

ASSETS = pathlib.Path(__file__).resolve().parent.parent / "assets"
# By JAX's device_kind: the topology whose data sheet holds the bandwidth.
KINDS = {"H200": "h200", "TPU v5 lite": "v5e", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6": "v6e", "TPU v4": "v4"}
GREEDY = SamplingParams()


def models_of(size: str, dtype: str, layers: int, head: tuple[int, int]) -> random_weights.Models:
    """Random target and drafter of a public size ("tiny": the shape of assets/tiny_qwen3); head: ranks E and U."""
    folder = ASSETS / ("tiny_qwen3" if size == "tiny" else f"qwen3_configs/{size}")
    config = loading.read_target_config(folder)
    target = Qwen3(config, np.dtype(dtype))
    shapes = jax.eval_shape(target.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    params = random_weights.random_params(shapes, dtype)
    drafter = DrafterConfig.for_target(
        config,
        num_layers=layers,
        target_layer_ids=None,
        block_size=16,
        projector="domino",
        shift_label=True,
        pure_draft_prefix_len=1,
        emb_dim=head[0],
        gru_hidden_dim=head[1],
    )
    loaded = loading.LoadedTarget(size, target, params, None, ())
    return random_weights.random_drafter(loaded, drafter)


def stopwatch(part, carry_of, models, state):
    """turns → seconds of a jitted loop that runs part(models, state, carry) → carry so often."""

    @jax.jit
    def program(models, state, turns):
        return jax.lax.fori_loop(0, turns, lambda _, carry: part(models, state, carry), carry_of(state))

    def seconds(turns: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(models, state, np.int32(turns)))
        return time.perf_counter() - begin

    return seconds


def checked(models, state: DecodeState, rows: int):
    """verify of `rows` rows and its choices, as a round uses them."""

    def part(models, state: DecodeState, carry):
        tokens, cache = carry
        taps = models.drafter.config.target_layer_ids
        out = verify(models, cache, tokens, state.lengths, tap_layers=taps)
        kept = (1e-30 * out.features.sum()).astype(jnp.int32)  # the features are used; their sum is below a token id
        return jnp.argmax(out.logits, -1).astype(jnp.int32) + kept, out.cache

    def begin(state):
        return jnp.broadcast_to(state.anchors[:, None], (1, rows)), state.target_cache

    return stopwatch(part, begin, models, state)


def proposed(models, state: DecodeState, nodes: int):
    """A tree of `nodes` nodes: backbone, candidates, head and all."""
    settings = DraftSettings(scale=float("inf"), tree=TreeSettings(nodes=nodes))

    def part(models, state: DecodeState, carry):
        anchors, cache = carry
        tree, cache = propose_tree(models, state.replace(anchors=anchors, draft_cache=cache), GREEDY, settings)
        return tree.tokens[:, -1], cache

    return stopwatch(part, lambda state: (state.anchors, state.draft_cache), models, state)


def measure(choices: argparse.Namespace) -> dict[str, float]:
    """Median seconds of every part."""
    loading.use_exact_matmuls(choices.dtype)
    models = models_of(choices.size, choices.dtype, choices.layers, choices.head)
    shape = {"cache_slots": choices.slots, "smallest_cache": choices.slots, "max_new_tokens": choices.slots // 4}
    temperature, top_k, top_p, min_p = choices.sampling
    sampling = SamplingParams(temperature, int(top_k), top_p, min_p)
    shape |= {"simulated_tau": choices.tau, "sampling": sampling}
    generator = new_generator(models, GeneratorSettings(**shape))
    state = generator.start(models, [list(range(choices.slots // 4))], [0])
    timed = {f"verify({rows})": checked(models, state, rows) for rows in sorted({17, *choices.widths})}
    timed |= {f"propose_tree({nodes})": proposed(models, state, nodes) for nodes in choices.widths}
    chain = round_split(models, generator, state, ("autoregressive", "domino"), choices.repeats)
    split = chain["domino"]
    seconds = {"step": chain["autoregressive"]["round"]}
    seconds |= {name: split[name] for name in ("draft", "head", "commit", "round")}
    seconds["round_without_head"] = split["without_head"]
    seconds |= turn_seconds(timed, choices.repeats)
    for nodes in choices.widths:
        drafting = DraftSettings(tree=TreeSettings(nodes=nodes))
        tree = new_generator(models, GeneratorSettings(**shape, drafting=drafting))
        seconds[f"round_tree({nodes})"] = round_split(models, tree, state, ("tree",), choices.repeats)["tree"]["round"]
    return {"seconds": seconds, "must": must_bytes(models, state, seconds)}


def must_bytes(models, state: DecodeState, names) -> dict[str, int]:
    """Bytes that a part must move (compile_decode.must_move); verify of more rows differs by the rows it writes."""
    found = must_move(models, state)
    row = (found["verify64"] - found["verify17"]) // 47
    widths = {name: int(name[7:-1]) for name in names if name.startswith("verify(")}
    found |= {name: found["step"] + (rows - 1) * row for name, rows in widths.items()}
    return {name: found[name] for name in names if name in found}


def copy_bandwidth(megabytes: int, repeats: int) -> float:
    """Bytes/s that the device reads and writes together when it copies."""
    timed, copied = copy_stopwatch(megabytes)
    return copied / turn_seconds({"copy": timed}, repeats)["copy"]


def report(choices: argparse.Namespace) -> dict:
    """All figures as JSON values."""
    device = jax.devices()[0]
    made = measure(choices)
    kind = next((name for part, name in KINDS.items() if part in device.device_kind), None)
    sheet = topologies.CHIPS[kind].bandwidth if kind else None
    copied = copy_bandwidth(choices.copy_megabytes, choices.repeats)
    parts = {}
    for name, seconds in made["seconds"].items():
        must = made["must"].get(name)
        parts[name] = {
            "milliseconds": seconds * 1e3,
            "must_bytes": must,
            "limit_milliseconds": must / sheet * 1e3 if must and sheet else None,
            "copy_limit_milliseconds": must / copied * 1e3 if must else None,
        }
    seconds = made["seconds"]
    return {
        "simulated": True,
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": str(datetime.date.today()),
        "choices": {key: value for key, value in vars(choices).items() if key != "output"},
        "copy_bytes_per_second": copied,
        "sheet_bytes_per_second": sheet,
        "parts": parts,
        "round_per_step": seconds["round"] / seconds["step"],
        "speedup_at_tau": choices.tau * seconds["step"] / seconds["round"],
    }


def markdown(found: dict) -> str:
    """The table, with the line that says what it is."""
    asked = found["choices"]
    lines = [
        f"Qwen3-{asked['size']} shape, {asked['dtype']}, {asked['slots']} cache slots, one row, {found['device']}, jax "
        f"{found['jax']}, {found['date']}. **Random weights, acceptance set to {asked['tau']}: a simulation.** Copy "
        f"bandwidth measured: {found['copy_bytes_per_second'] / 1e9:,.0f} GB/s.",
        "",
        "| part | ms | must move GB | ms at the data sheet's bandwidth | ms at the copy bandwidth |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, part in found["parts"].items():
        values = (part["must_bytes"] and part["must_bytes"] / 1e9, part["limit_milliseconds"])
        cells = [f"{value:.3f}" if value else "–" for value in (*values, part["copy_limit_milliseconds"])]
        lines.append(f"| {name} | {part['milliseconds']:.3f} | " + " | ".join(cells) + " |")
    ratio, speedup = found["round_per_step"], found["speedup_at_tau"]
    lines += ["", f"A round is {ratio:.2f} steps: {speedup:.2f} × at τ = {asked['tau']} (simulated)."]
    return "\n".join(lines)


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="8b", help="tiny, 0.6b, 1.7b, 4b, 8b, 14b or 32b")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tau", type=float, default=7.17, help="acceptance length to force")
    numbers = (("slots", 4096), ("layers", 5), ("repeats", 7), ("copy-megabytes", 1024))
    for name, default in numbers:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 32, 64, 128], help="rows of verify and of trees")
    parser.add_argument("--head", type=int, nargs=2, default=[256, 1024], help="emb_dim and gru_hidden_dim")
    kept = ("TEMPERATURE", "TOP_K", "TOP_P", "MIN_P")
    parser.add_argument("--sampling", type=float, nargs=4, default=[0, 0, 1, 0], metavar=kept, help="greedy by default")
    parser.add_argument("--cpu-tiny", action="store_true", help="the tiny shape in float32, few and narrow")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write as well")
    choices = parser.parse_args(argv)
    if choices.cpu_tiny:
        tiny = {"size": "tiny", "dtype": "float32", "slots": 512, "layers": 2, "repeats": 3, "copy_megabytes": 64}
        for name, value in (tiny | {"widths": [16], "head": [32, 64]}).items():
            setattr(choices, name, value)
    return choices


def main() -> None:
    choices = parsed()
    found = report(choices)
    print(markdown(found), flush=True)
    if choices.output:
        choices.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
