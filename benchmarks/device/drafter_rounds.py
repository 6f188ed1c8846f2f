"""What a round of a drafter costs before it is trained: candidate shapes for one target, with random weights.

    python -m benchmarks.device.drafter_rounds --config=configs/smollm2_135m.py --layers 1 2 3 --blocks 4 6 8
    python -m benchmarks.device.drafter_rounds --small                          # a test of the command

A round pays when it emits more tokens than plain steps would in its time, so its break-even τ is round ÷ step. That
depends on the shape of the drafter and on the device, not on what the drafter has learnt. All candidates and the plain
step are timed in one process, alternating, as medians; the step is the target's own with its real weights.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import runpy
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from benchmarks.device.random_models import state_of
from benchmarks.tables import ROOT, conditions, markdown
from domino_jax.decoding.generate import new_generator
from domino_jax.decoding.settings import BASELINE, DRAFT, DecodeSettings
from domino_jax.evals.round_times import endless, round_stopwatch, turn_seconds
from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafters import CONFIGS
from domino_jax.method.settings import DraftSettings
from domino_jax.training.flops import device_bytes
from domino_jax.weights import loading, random_weights

SLOTS = 256  # of the caches: a prompt and an answer of everyday length
STEP = "step"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A candidate: draft layers, their hidden units (0: the target's), tapped target layers, block size, and the head's
    (emb_dim, gru_hidden_dim) or ().
    """

    layers: int
    hidden: int
    taps: int
    block: int
    head: tuple[int, int] | tuple[()]

    @property
    def name(self) -> str:
        head = "×".join(map(str, self.head)) or "none"
        return f"{self.layers}, {self.hidden or 'all'}, {self.taps}, {self.block}, {head}"

    def config(self, target) -> DrafterConfig:
        """The config of a drafter of this shape; taps are spread over the target as the public rule spreads them."""
        last = target.num_hidden_layers - 2
        head = (
            {"pure_draft_prefix_len": 1, "emb_dim": self.head[0], "gru_hidden_dim": self.head[1]} if self.head else {}
        )
        return CONFIGS["domino" if self.head else "none"].for_target(
            target,
            num_layers=self.layers,
            intermediate_size=self.hidden or target.intermediate_size,
            target_layer_ids=tuple(last * place // self.taps for place in range(1, self.taps + 1)),
            block_size=self.block,
            shift_label=True,
            **head,
        )


def measure(loaded: loading.LoadedTarget, shapes: Sequence[Shape], candidates: int, rows: int, repeats: int):
    """{name: seconds of a turn} of the step and of every shape's round, and {name: bytes of its bfloat16 export}."""
    timed, sizes = {}, {}
    for shape in shapes:
        models = random_weights.random_drafter(loaded, shape.config(loaded.model.config))
        head_candidates = candidates if shape.head else 0
        drafting = DraftSettings(use_head=bool(shape.head), head_candidates=head_candidates)
        settings = DecodeSettings(
            cache_length=SLOTS, smallest_cache=SLOTS, max_new_tokens=SLOTS // 4, batch_size=rows, drafting=drafting
        )
        generator = new_generator(models, settings)
        state = endless(state_of(models, generator, rows, SLOTS, SLOTS // 2))
        if not timed:
            timed[STEP] = round_stopwatch(models, generator, state, BASELINE)
        timed[shape.name] = round_stopwatch(models, generator, state, DRAFT)
        sizes[shape.name] = device_bytes(models.drafter_params) * 2 // models.target.dtype.itemsize
    return turn_seconds(timed, repeats), sizes


COLUMNS = {"shape": "layers, hidden units, taps, block, head", "ms": "round, ms", "break_even": "break-even τ"}
COLUMNS |= {"largest": "largest τ", "mb": "MB in bfloat16"}


def rows_of(seconds: Mapping[str, float], sizes: Mapping[str, int], shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """One row for each shape."""
    return [
        {
            "shape": shape.name,
            "ms": seconds[shape.name] * 1e3,
            "break_even": seconds[shape.name] / seconds[STEP],
            "largest": shape.block + 1,
            "mb": sizes[shape.name] / 1e6,
        }
        for shape in shapes
    ]


def head_of(text: str) -> tuple[int, int] | tuple[()]:
    if text == "none":
        return ()
    rank, state = text.split("x")
    return int(rank), int(state)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/smollm2_135m.py")
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--hidden", type=int, nargs="*", default=[0], help="units of a layer; 0: as many as the target")
    parser.add_argument("--taps", type=int, nargs="*", default=[3])
    parser.add_argument("--blocks", type=int, nargs="*", default=[4, 6, 8])
    parser.add_argument("--heads", type=head_of, nargs="*", default=[(), (64, 128)], help="none or EMB_DIMxGRU")
    parser.add_argument("--candidates", type=int, default=64, help="as decode.head_candidates")
    parser.add_argument("--rows", type=int, default=1, help="requests of a batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file to write as well")
    parser.add_argument("--small", action="store_true", help="two shapes for the tiny target")
    choices = parser.parse_args(argv)
    if choices.small:
        choices.config, choices.layers, choices.blocks, choices.repeats = str(ROOT / "configs/tiny.py"), [1], [4], 1
        choices.heads = [(), (8, 8)]
    recipe = runpy.run_path(choices.config)["get_config"]()
    logging.set_verbosity(logging.ERROR)
    grid = (choices.layers, choices.hidden, choices.taps, choices.blocks, choices.heads)
    shapes = [Shape(*one) for one in itertools.product(*grid)]
    loading.use_exact_matmuls(recipe.decode.dtype)
    loaded = loading.load_target(recipe.target.path, recipe.decode.dtype, quantize=recipe.target.quantize)
    seconds, sizes = measure(loaded, shapes, choices.candidates, choices.rows, choices.repeats)
    print(f"A plain step takes {seconds[STEP] * 1e3:.1f} ms.\n\n{markdown(rows_of(seconds, sizes, shapes), COLUMNS)}")
    print(f"\n{recipe.target.path}, {recipe.decode.dtype}, {choices.rows} rows. {conditions()}")
    if choices.output:
        choices.output.write_text(json.dumps({"seconds": seconds, "bytes": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
