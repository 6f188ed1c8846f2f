"""One Domino training step, the same weights, rows and anchors: SpecForge's modules on torch against this package.

    pip install -r requirements.txt torch transformers                       # the CPU build of torch will do
    git clone --depth=1 https://github.com/sgl-project/SpecForge FOLDER
    python -m benchmarks.peers.specforge --specforge=FOLDER                # the tiny recipe's shapes
    python -m benchmarks.peers.specforge --specforge=FOLDER --case=small   # random weights, 512 wide, 8,192 tokens

Both sides take the step from the rows' ids to the new weights: the frozen target's pass, anchors' blocks, the drafter
forward, the dual cross-entropy, backward, clipping by the global norm and AdamW with a constant rate, all in float32.
Rows are padded to the longest, as SpecForge does; labels run over gaps in the loss mask (`contiguous` off), as
SpecForge's do; λ stays at one half.

SpecForge's own are the drafter (`DominoDraftModel`), everything from the noise embedding to the loss
(`OnlineDominoModel`) and the optimizer (`BF16Optimizer`). The anchors are those of our step, given by a subclass. The
features come from transformers' Qwen3, because SpecForge's trainer gets them from an SGLang server, which needs a GPU.

Both sides start from the same folders. Each step takes new rows, the same on both sides, which alternate in going
first. The losses of every step must agree to TOLERANCE of their value, or no table is written. A figure is the median
over the steps; the first step compiles and is timed separately. Both sides have the same cores, --threads of them (0:
all this process may use). Writes a section of docs/benchmarks.md and a CSV file.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from assets.target_folder import save_target
from benchmarks.device.train_step import LAMBDA, RATE, step_without_target
from benchmarks.tables import DOCS, ROOT, conditions, publish, ratio
from domino_jax.method import blocks
from domino_jax.method.drafter import Drafter, init_drafter_params
from domino_jax.method.heads.domino import DominoConfig
from domino_jax.method.losses import LossSettings
from domino_jax.method.optimizer import CLIP_NORM, make_optimizer
from domino_jax.method.state import init_state
from domino_jax.method.step import make_train_step, target_pass
from domino_jax.models.qwen3 import Qwen3, Qwen3Config
from domino_jax.weights import formats, loading
from domino_jax.weights.drafter import load_drafter, save_drafter
from domino_jax.weights.random_weights import random_params
from domino_jax.weights.target import read_target_config

OURS, THEIRS = SIDES = ("domino_jax", "SpecForge")
TOLERANCE = 1e-5
PAUSE = 0.03  # seconds between the sides: an OpenMP pool spins for a moment after its last work
SEED = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of a comparison. The models are the shipped tiny ones where target is None, else random.

    rows × length tokens and anchors blocks per row make a step; gamma: decay of the slots.
    """

    rows: int
    length: int
    anchors: int
    gamma: float
    target: dict | None = None
    drafter: dict | None = None


CASES = {
    "tiny": Case(rows=4, length=224, anchors=32, gamma=4.0),
    "small": Case(
        rows=4,
        length=512,
        anchors=64,
        gamma=7.0,
        target={
            "model_type": "qwen3",
            "vocab_size": 8_192,
            "hidden_size": 512,
            "intermediate_size": 1_536,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "max_position_embeddings": 4_096,
        },
        drafter={
            "num_layers": 2,
            "target_layer_ids": (1, 2, 3),
            "block_size": 16,
            "shift_label": True,
            "pure_draft_prefix_len": 1,
            "emb_dim": 128,
            "gru_hidden_dim": 256,
        },
    ),
}


def write_models(case: Case, folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The folders of the target and of the drafter, in float32 and with the architecture that SpecForge looks for."""
    drafter_folder = folder / "drafter"
    if case.target is None:
        target_folder = ROOT / "assets" / "tiny_qwen3"
        target = read_target_config(target_folder)
        config, params = load_drafter(ROOT / "assets" / "tiny_domino", target, np.dtype("float32"))
    else:
        target_folder, target = folder / "target", Qwen3Config.from_dict(case.target)
        key = jax.random.key(SEED)
        shapes = jax.eval_shape(Qwen3(target).init, key, jnp.zeros((1, 2), jnp.int32))["params"]
        save_target(target_folder, target, random_params(shapes, "float32"), "float32")
        config = DominoConfig.for_target(target, **case.drafter)
        params = jax.jit(functools.partial(init_drafter_params, Drafter(config)))(key)
    save_drafter(drafter_folder, config, jax.device_get(params), "float32", formats.SPECFORGE)
    return target_folder, drafter_folder


def random_batch(case: Case, vocab: int, number: int) -> dict[str, np.ndarray]:
    """Rows of 40 to 100 % of the length, a quarter of each a prompt; the first row is full, so both sides pad alike."""
    draw = np.random.default_rng((SEED, number))
    tokens = draw.integers(0, vocab - 1, (case.rows, case.length), dtype=np.int32)  # never the mask token
    sizes = draw.integers(case.length * 2 // 5, case.length + 1, case.rows)
    sizes[0] = case.length
    place = np.arange(case.length)
    inside, answer = place < sizes[:, None], place >= sizes[:, None] // 4
    return {
        "tokens": np.where(inside, tokens, 0),
        "loss_mask": (inside & answer).astype(np.float32),
        "row_ids": np.arange(case.rows, dtype=np.int32) + number * case.rows,
    }


class OurTrainer:
    """The state of a run and its step: the package's own training step, and the same with the features given."""

    def __init__(self, target: pathlib.Path, drafter: pathlib.Path, case: Case):
        loading.use_exact_matmuls("float32")
        models = loading.load_models(loading.load_target(str(target), "float32"), str(drafter))
        self.case, self.target, self.target_params = case, models.target, models.target_params
        self.drafter = drafter = Drafter(models.drafter.config)
        settings = LossSettings(gamma=case.gamma, contiguous=False)
        optimizer = make_optimizer("adamw")
        self.whole = make_train_step(
            self.target,
            drafter,
            optimizer,
            num_anchors=case.anchors,
            learning_rate=lambda step: RATE,
            curriculum=lambda step: jnp.float32(LAMBDA),
            settings=settings,
        )
        self.bare = step_without_target(self.target, drafter, optimizer, settings, case.anchors)
        self.features = jax.jit(
            lambda params, batch: target_pass(self.target, params, batch, drafter.config.target_layer_ids)[0]
        )
        self.key = jax.random.key(SEED)
        # Jitted, so that no two leaves share memory: both states are donated.
        start = jax.jit(lambda params: init_state(drafter, optimizer, self.key).replace(params=params))
        self.state, self.bare_state = start(models.drafter_params), start(models.drafter_params)

    def anchors(self, batch: dict[str, np.ndarray], number: int) -> tuple[np.ndarray, np.ndarray]:
        """The anchors that step `number` draws: int32 and bool [B, A]."""
        key = jax.random.fold_in(self.key, number)
        return jax.device_get(blocks.sample_anchors(key, batch["loss_mask"], batch["row_ids"], self.case.anchors))

    def step(self, batch: dict[str, np.ndarray]) -> float:
        """Takes the next step; its loss."""
        self.state, metrics = self.whole(self.state, self.target_params, batch, self.key)
        return float(jax.block_until_ready((self.state, metrics))[1]["loss"])

    def step_with_features(self, batch: dict[str, np.ndarray], number: int) -> float:
        """The seconds of the same step, in a separate run, with the target's features computed before the clock."""
        features = jax.block_until_ready(self.features(self.target_params, batch))
        key = jax.random.fold_in(self.key, number)
        begin = time.perf_counter()
        self.bare_state, loss = self.bare(self.bare_state, self.target_params, batch, features, key)
        jax.block_until_ready((self.bare_state, loss))
        return time.perf_counter() - begin


class SpecForgeTrainer:
    """The same for SpecForge's modules. Their scores are `sdpa`: flex_attention has no backward pass on a CPU."""

    def __init__(self, target: pathlib.Path, drafter: pathlib.Path, case: Case):
        import torch
        from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
        from specforge.modeling.draft.domino import DominoDraftModel
        from specforge.optimizer import BF16Optimizer
        from transformers import AutoModelForCausalLM

        class GivenAnchors(OnlineDominoModel):
            anchors: tuple

            def _sample_anchor_positions(self, seq_len, loss_mask, device):
                return self.anchors

        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().requires_grad_(False)
        module = DominoDraftModel.from_pretrained(drafter, dtype=torch.float32, attn_implementation="sdpa").train()
        self.taps = module.target_layer_ids
        self.model = GivenAnchors(
            module,
            self.target.lm_head,
            self.target.get_input_embeddings(),
            mask_token_id=module.mask_token_id,
            block_size=module.block_size,
            attention_backend="sdpa",
            loss_decay_gamma=case.gamma,
            objective_chunk_blocks=0,  # all logits at once, computed once
            shift_label=module.shift_label,
        )
        schedule = {"warmup_ratio": 0.0, "lr_scheduler": "constant"}
        self.optimizer = BF16Optimizer(module, RATE, max_grad_norm=CLIP_NORM, **schedule)

    def step(self, batch: dict[str, np.ndarray], anchors: np.ndarray, keep: np.ndarray) -> tuple[float, float]:
        """(loss, seconds without the target's pass) of the next step, with as many anchors as the fullest row has."""
        import torch
        from specforge.modeling.draft.dflash import extract_context_feature

        tokens, mask = torch.from_numpy(batch["tokens"]).long(), torch.from_numpy(batch["loss_mask"])
        width = int(keep.sum(1).max())
        self.model.anchors = torch.tensor(anchors[:, :width]).long(), torch.tensor(keep[:, :width])
        with torch.no_grad():
            out = self.target.model(tokens, use_cache=False, output_hidden_states=True)
            features = extract_context_feature(out.hidden_states, self.taps)
        begin = time.perf_counter()
        loss, _, _ = self.model(tokens, features, mask, lambda_base=LAMBDA)
        loss.backward()
        self.optimizer.step()
        return loss.item(), time.perf_counter() - begin


@dataclasses.dataclass
class Measured:
    """Per side a figure for each counted step; the losses and first_seconds include the step that compiles."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    without_target: dict[str, list[float]]
    losses: dict[str, list[float]]
    first_seconds: dict[str, float]

    @property
    def difference(self) -> float:
        """The largest difference between the losses of a step, relative to SpecForge's."""
        return max(abs(1 - ours / theirs) for ours, theirs in zip(*self.losses.values(), strict=True))


def measure(case: Case, ours: OurTrainer, theirs: SpecForgeTrainer, steps: int) -> Measured:
    measured = Measured(*({side: [] for side in SIDES} for _ in range(4)), {})
    for number in range(steps + 1):
        batch = random_batch(case, ours.target.config.vocab_size, number)
        anchors, keep = ours.anchors(batch, number)
        without_target = {OURS: ours.step_with_features(batch, number)}
        for side in SIDES[:: 1 if number % 2 else -1]:
            time.sleep(PAUSE)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            if side == OURS:
                loss = ours.step(batch)
            else:
                loss, without_target[side] = theirs.step(batch, anchors, keep)
            seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
            measured.losses[side].append(loss)
            if number == 0:
                measured.first_seconds[side] = seconds
                continue
            measured.seconds[side].append(seconds)
            measured.cpu_seconds[side].append(cpu_seconds)
            measured.without_target[side].append(without_target[side])
    return measured


COLUMNS = {"side": "", "rows_s": "rows/s", "ms": "ms per step", "cpu_ms": "CPU ms", "rest_ms": "ms without the target"}
COLUMNS |= {"first_s": "first step, s", "ratio": "× SpecForge's rows/s", "least": "least", "most": "most"}


def rows_of(case: Case, measured: Measured) -> list[dict[str, Any]]:
    """One row for each side: medians over the steps."""
    rows = []
    for side in SIDES:
        seconds, cpu, rest = (
            statistics.median(figures[side])
            for figures in (measured.seconds, measured.cpu_seconds, measured.without_target)
        )
        row = {"side": side, "rows_s": case.rows / seconds, "ms": seconds * 1e3, "cpu_ms": cpu * 1e3}
        row |= {"rest_ms": rest * 1e3, "first_s": measured.first_seconds[side]}
        rows.append(row | ratio(measured.seconds[THEIRS], measured.seconds[side]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specforge", type=pathlib.Path, required=True, help="a checkout of SpecForge")
    parser.add_argument("--case", choices=CASES, default="tiny")
    parser.add_argument("--steps", type=int, default=10, help="that are counted; one more comes first")
    parser.add_argument("--threads", type=int, default=0, help="cores for both sides; 0: all")
    parser.add_argument("--page", type=pathlib.Path, default=DOCS / "benchmarks.md")
    choices = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if choices.threads:  # before XLA starts one thread per core that it finds
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: choices.threads])
    if not (choices.specforge / "specforge").is_dir():
        parser.error(f"{choices.specforge} has no folder specforge; name the root of a checkout of SpecForge.")
    sys.path.insert(0, str(choices.specforge.resolve()))
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    case = CASES[choices.case]
    with tempfile.TemporaryDirectory() as folder:
        folders = write_models(case, pathlib.Path(folder))
        measured = measure(case, OurTrainer(*folders, case), SpecForgeTrainer(*folders, case), choices.steps)
    for number, pair in enumerate(zip(*measured.losses.values(), strict=True)):
        print(f"step {number}: losses " + ", ".join(f"{loss:.7f}" for loss in pair), flush=True)
    if measured.difference > TOLERANCE:
        raise SystemExit(f"the losses differ by {measured.difference:.1e} of them, more than {TOLERANCE:g}: no table.")
    options = f"--case={choices.case} --steps={choices.steps} --threads={choices.threads}"
    text = (
        f"`python -m benchmarks.peers.specforge --specforge=FOLDER {options}`\n\n"
        f"{case.rows} rows × {case.length} tokens, {case.anchors} anchors per row, float32; medians of {choices.steps} "
        f"steps, alternating. The losses of all steps agree to {measured.difference:.0e} of their value. "
        f"{conditions(('jax', 'torch', 'transformers'))}"
    )
    print(publish(choices.page, f"against_specforge {choices.case}", rows_of(case, measured), COLUMNS, text))


if __name__ == "__main__":
    main()
