"""The golden sets on the device at hand: what the public PyTorch modules computed against what this device computes.

Float32 meets the tolerances of tests/golden/README.md. bfloat16 has none there: its logits may differ by LOGITS_BF16 of
their size, and the texts of Domino and plain decoding only at near ties (docs/method.md).
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from domino_jax.decoding.generate import Generator, new_generator
from domino_jax.decoding.settings import BASELINE, DOMINO, DecodeSettings
from domino_jax.evals.near_ties import divergences
from domino_jax.method.losses import Loss
from domino_jax.method.pair import Pair
from domino_jax.method.propose import propose
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.method.step import batch_gradients, label_blocks
from domino_jax.weights.drafter import drafter_table
from domino_jax.weights.loading import load_models, load_target

# Absolute errors, but of gradients, which are relative.
ARRAYS, LOSSES, METRICS, GRADIENTS = 1e-4, 1e-5, 1e-6, 1e-4
LOGITS_BF16 = 0.02  # norm of the difference ÷ norm of the reference
FIGURES = {"loss": LOSSES, "final_loss": LOSSES, "base_loss": LOSSES, "accuracy": METRICS, "accept_len": METRICS}


def parity(golden: pathlib.Path, sets: Sequence[str]) -> dict[str, Any]:
    """Every check as {"error", "limit"}, by set and dtype; "failed" names those that miss their limit."""
    checked = {}
    for name in sets:
        for dtype in ("float32", "bfloat16"):
            precision = "highest" if dtype == "float32" else "default"
            with jax.default_matmul_precision(precision):
                checked[f"{name} {dtype}"] = compare(golden / name, dtype)
    missed = [
        f"{part}: {check} {one['error']:.3g} > {one['limit']:g}"
        for part, checks in checked.items()
        for check, one in checks.items()
        if not one["error"] <= one["limit"]
    ]
    return {"checks": checked} | ({"failed": "; ".join(missed)} if missed else {})


def compare(folder: pathlib.Path, dtype: str) -> dict[str, dict[str, float]]:
    loaded = load_target(str(folder / "target"), dtype)
    models = load_models(loaded, str(folder / "drafter"))
    arrays, figures = load_file(folder / "golden.safetensors"), json.loads((folder / "golden.json").read_text())
    errors = target_errors(models, arrays) if dtype == "float32" else relative_errors(models, arrays)
    if dtype == "float32":
        errors |= training_errors(models, arrays, figures)
    errors |= decoding_errors(models, figures, exact=dtype == "float32")
    return {check: {"error": float(error), "limit": limit} for check, (error, limit) in errors.items()}


def target_pass(models: Pair, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits and tapped features of whole rows, by one uncached pass."""
    taps = models.drafter.config.target_layer_ids
    run = jax.jit(lambda models, tokens: models.run_target(tokens, tap_layers=taps))
    out = run(models, jnp.asarray(tokens, jnp.int32))
    return {name: np.asarray(out[name], np.float64) for name in ("logits", "features")}


def target_errors(models: Pair, arrays) -> dict[str, tuple[float, float]]:
    out = target_pass(models, arrays["target.input_ids"])
    references = {"logits": arrays["target.logits"], "features": arrays["target.context_features"]}
    return {name: (np.abs(out[name] - values).max(), ARRAYS) for name, values in references.items()}


def relative_errors(models: Pair, arrays) -> dict[str, tuple[float, float]]:
    out, reference = target_pass(models, arrays["target.input_ids"])["logits"], arrays["target.logits"]
    return {"logits": (np.linalg.norm(out - reference) / np.linalg.norm(reference), LOGITS_BF16)}


def training_errors(models: Pair, arrays, figures) -> dict[str, tuple[float, float]]:
    """Losses and metrics at each λ, and the norm of every tensor's gradient."""
    config = models.drafter.config
    tokens = jnp.asarray(arrays["target.input_ids"], jnp.int32)
    batch = {"tokens": tokens, "loss_mask": jnp.asarray(arrays["train.loss_mask"]), "row_ids": jnp.arange(len(tokens))}
    blocks = (jnp.asarray(arrays["train.anchors"], jnp.int32), jnp.asarray(arrays["train.block_valid"] > 0))
    loss = Loss(gamma=figures["gamma"], contiguous=False)

    @jax.jit
    def run(models, share):
        drawn = label_blocks(batch, *blocks, config, loss)
        step_loss = loss.at(share, drawn.labels)
        sums, gradients = batch_gradients(models, batch, drawn, step_loss)
        return step_loss.metrics(sums), gradients

    errors = {}
    for key, reference in figures["train"].items():
        metrics, gradients = jax.device_get(run(models, jnp.float32(key.split("=")[1])))
        errors |= {f"{key} {name}": (abs(metrics[name] - reference[name]), limit) for name, limit in FIGURES.items()}
        norms = gradient_norms(config, gradients)
        apart = {tensor: abs(norms[tensor] - norm) / (norm or 1e-30) for tensor, norm in reference["grad_norm"].items()}
        errors[f"{key} gradients"] = (max(apart.values()), GRADIENTS)
    return errors


def gradient_norms(config, gradients: dict) -> dict[str, float]:
    """By the tensors' public names."""
    norms = {}
    for entry in drafter_table(config):
        leaf = gradients
        for part in entry.path:
            leaf = leaf[part]
        norms[entry.name] = np.linalg.norm(leaf.astype(np.float64))
    return norms


def decoding_errors(models: Pair, figures, exact: bool) -> dict[str, tuple[float, float]]:
    """Answers that differ. exact: from the reference's; else those of Domino from plain decoding's, near ties apart."""
    rows = figures["generate"]
    settings = DecodeSettings(cache_length=128, max_new_tokens=rows[0]["max_new_tokens"], batch_size=len(rows))
    generator = new_generator(models, settings)
    prompts = [row["prompt"] for row in rows]
    plain, domino = (generator.generate(models, prompts, mode).answers for mode in (BASELINE, DOMINO))
    if not exact:
        apart = divergences(models, generator, prompts, plain, domino)
        return {"texts beyond near ties": (sum(not one.near_tie for one in apart), 0)}
    outputs, drafts = [row["output"] for row in rows], [row["first_round_draft"] for row in rows]
    return {
        "plain texts": (differing([answer.token_ids for answer in plain], outputs), 0),
        "Domino texts": (differing([answer.token_ids for answer in domino], outputs), 0),
        "accept lengths": (differing([answer.accept_lengths for answer in domino], list(map(accepts, rows))), 0),
        "first drafts": (differing(first_drafts(models, generator, prompts), drafts), 0),
    }


def differing(ours: list, theirs: list) -> int:
    return sum(one != other for one, other in zip(ours, theirs, strict=True))


def accepts(row: dict) -> list[int]:
    """The reference's accept lengths, the last one cut to the tokens kept; the first token is the prefill's."""
    *whole, last = row["accept_lengths"]
    return [*whole, min(last, row["max_new_tokens"] - 1 - sum(whole))]


def first_drafts(models: Pair, generator: Generator, prompts: list[list[int]]) -> list[list[int]]:
    state = generator.start(models, prompts, range(len(prompts)))
    run = jax.jit(lambda models, state: propose(models, state, SamplingParams(), DraftSettings())[0])
    return run(models, state).tolist()
