"""One training step at a model shape with random weights: medians over repeated steps, on whatever device is present.

    python -m benchmarks.device.train_step --size=8b --rows=2 --length=768            # a GPU or TPU
    python -m benchmarks.device.train_step --size=tiny --rows=8 --length=224 --anchors=48 --dtype=float32
    python -m benchmarks.device.train_step --small                              # a test of the command, on any CPU

Times the whole step (frozen target, drafter, loss, update) and the step without the target's pass (its features given),
alternating, so that a noisy machine disturbs them alike. TFLOP/s by the products of the traced step
(domino_jax/training/flops.py).
--no-head trains a plain DFlash drafter, as the public trainer's published point does.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.device.random_models import drafter_config, random_params, target_config
from domino_jax.method import blocks
from domino_jax.method.drafter import Drafter
from domino_jax.method.losses import Loss
from domino_jax.method.optimizer import learning_rate, make_optimizer
from domino_jax.method.pair import Pair
from domino_jax.method.state import init_state
from domino_jax.method.step import drafter_loss, label_blocks, make_train_step, target_pass
from domino_jax.models import sharding
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.training.flops import peak_flops, product_flops
from domino_jax.weights import loading
from domino_jax.weights.target import target_shapes

PARTS = ("whole", "without_target")
LAMBDA = 0.5
RATE = 6e-4  # the learning rate


def random_batch(target: Qwen3Config, rows: int, length: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, target.vocab_size - 1, (rows, length), dtype=np.int32)
    return {
        "tokens": tokens,
        "loss_mask": np.ones((rows, length), np.float32),
        "row_ids": np.arange(rows, dtype=np.int32),
    }


def step_without_target(target: Qwen3, drafter: Drafter, optimizer, loss: Loss, anchors: int):
    """(state, target params, batch, features, key) → (state, loss): the step with the target's features given."""

    def step(state, target_params, batch, features, key):
        places = blocks.sample_anchors(key, batch["loss_mask"], batch["row_ids"], anchors)
        drawn = label_blocks(batch, *places, drafter.config, loss)
        step_loss = loss.at(LAMBDA, drawn.labels)

        models, with_gradients = Pair(target, target_params, drafter), jax.value_and_grad(drafter_loss, has_aux=True)
        (value, _), gradients = with_gradients(state.params, models, features, batch, drawn, step_loss)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        updates = jax.tree.map(lambda update: RATE * update, updates)
        state = state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)
        return state, {"loss": value}

    return jax.jit(step, donate_argnums=0)


def measure(choices: argparse.Namespace) -> dict:
    """Seconds of the steps of choices.parts, alternating, after a first round that compiles."""
    loading.use_exact_matmuls(choices.dtype)
    mesh = sharding.make_mesh(1, -1, 1)
    sharding.check_rows(mesh, choices.rows)
    target = Qwen3(target_config(choices.size), np.dtype(choices.dtype))
    head = (256, 1024) if choices.head else None
    config = drafter_config(target.config, choices.layers, choices.block, head)
    drafter = Drafter(config, np.dtype(choices.dtype), choices.remat)
    with jax.set_mesh(mesh):
        seconds, flops, loss = time_steps(mesh, target, drafter, choices)
    return {"seconds": seconds, "flops": flops, "loss": loss}


def time_steps(mesh, target: Qwen3, drafter: Drafter, choices: argparse.Namespace) -> tuple[dict, dict, float]:
    """({part: [seconds]}, {part: FLOPs of a step}, the last loss); the parts have a state each."""
    optimizer, loss = make_optimizer("adamw"), Loss(slice_blocks=choices.loss_slice)
    heads, key = target.config.num_key_value_heads, jax.random.key(0)
    params = random_params(target_shapes(target.config, choices.dtype), choices.dtype, sharding.placement(mesh, heads))
    start = functools.partial(init_state, drafter, optimizer)
    places = sharding.param_shardings(mesh, jax.eval_shape(start, key), heads)
    batch = sharding.global_batch(mesh, random_batch(target.config, choices.rows, choices.length))
    whole = make_train_step(
        target,
        drafter,
        optimizer,
        num_anchors=choices.anchors,
        learning_rate=learning_rate(RATE, 10_000, 0.04),
        curriculum=lambda step: jnp.float32(LAMBDA),
        loss=loss,
        shardings=(places, sharding.replicated(mesh)),
    )
    steps = {"whole": lambda state: whole(state, params, batch, key)}
    if "without_target" in choices.parts:
        taps = drafter.config.target_layer_ids
        features = jax.jit(lambda params, batch: target_pass(target, params, batch, taps)[0])(params, batch)
        bare = step_without_target(target, drafter, optimizer, loss, choices.anchors)
        steps["without_target"] = lambda state: bare(state, params, batch, features, key)
    states = {part: jax.jit(start, out_shardings=places)(key) for part in choices.parts}
    flops = {part: product_flops(jax.make_jaxpr(steps[part])(state)) for part, state in states.items()}
    seconds: dict[str, list[float]] = {part: [] for part in choices.parts}
    for turn in range(choices.steps + 1):
        for part in choices.parts:
            begin = time.perf_counter()
            states[part], metrics = steps[part](states[part])
            jax.block_until_ready((states[part], metrics))
            if turn:  # the first one compiles
                seconds[part].append(time.perf_counter() - begin)
    return seconds, flops, float(metrics["loss"])


def report(choices: argparse.Namespace, measured: dict) -> dict:
    kind = jax.devices()[0].device_kind
    peak = choices.peak_tflops * 1e12 if choices.peak_tflops else peak_flops(kind)
    out = {"device": kind, "devices": jax.device_count(), "jax": jax.__version__} | vars(choices)
    for name, seconds in measured["seconds"].items():
        median = statistics.median(seconds)
        rate = measured["flops"][name] / median
        out[name] = {
            "seconds": median,
            "spread": (max(seconds) - min(seconds)) / median,
            "milliseconds_per_row": median * 1e3 / choices.rows,
            "rows_per_second": choices.rows / median,
            "tokens_per_second": choices.rows * choices.length / median,
            "tflops_per_second": rate / 1e12,
            "share_of_peak": rate / (peak * jax.device_count()) if peak else None,
        }
    return out


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="8b", help="small, tiny, 0.6b, 1.7b, 4b, 8b, 14b or 32b")
    for name, default in (("rows", 2), ("length", 768), ("anchors", 256), ("block", 16), ("layers", 5), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--loss-slice", type=int, default=64, help="anchor blocks of a row whose logits live at once")
    parser.add_argument("--remat", action="store_true")
    parser.add_argument("--no-head", dest="head", action="store_false", help="a plain DFlash drafter")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what to time")
    parser.add_argument("--peak-tflops", type=float, help="of one device, where its data sheet is not known here")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--small", action="store_true", help="three narrow layers in float32, two steps")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write as well")
    choices = parser.parse_args(argv)
    if choices.small:
        small = {"size": "small", "dtype": "float32", "length": 24, "anchors": 4, "layers": 1, "block": 4, "steps": 2}
        for name, value in small.items():
            setattr(choices, name, value)
    return choices


def main(argv: list[str] | None = None) -> None:
    choices = parsed(argv)
    text = json.dumps(report(choices, measure(choices)), indent=2, default=str)
    print(text)
    if choices.output:
        choices.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
