"""README.md of an exported drafter: what it is, what it was trained on and how, what was measured, and with what."""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from domino_jax.evals.report import versions
from domino_jax.evals.tables import grid, say, width_note
from domino_jax.method.heads.eagle3_config import Eagle3Config
from domino_jax.method.heads.medusa import MedusaConfig
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.names import DFLASH2, DOMINO, EAGLE3, MARKOV, MEDUSA, NONE
from domino_jax.runtime.files import is_remote
from domino_jax.weights import formats

# By head the name of a drafter and the paper that describes it.
KINDS = {
    NONE: ("DFlash", ""),
    DOMINO: ("Domino", " (arXiv 2605.29707)"),
    MARKOV: ("DSpark", ""),
    DFLASH2: ("DFlash2", ""),
    EAGLE3: ("EAGLE-3", " (arXiv 2503.01840)"),
    MEDUSA: ("Medusa", " (arXiv 2401.10774)"),
}
TRAINING_PACKAGES = ("optax", "orbax-checkpoint", "grain")


def model_card(
    config: AnyConfig,
    weights: int,
    dtype: str,
    recipe: Mapping[str, Any],
    step: int,
    *,
    report: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    tau: float | None = None,
    format: str = formats.SERVING,
) -> str:
    """The card's text; the arguments are those of export.write_export, and weights counts parameters."""
    target = public_name(recipe["target"]["path"])
    kind, paper = KINDS[config.head]
    packages = {**versions(), **{name: importlib.metadata.version(name) for name in TRAINING_PACKAGES}}
    return f"""\
---
base_model: {json.dumps(target)}
library_name: domino_jax
pipeline_tag: text-generation
tags: [speculative-decoding, {kind.lower()}]
license: other # yours to name; those of the base model and of the training data bind you too
---

# {kind} drafter for {target}

A {kind} speculative-decoding drafter{paper}: it proposes tokens that the target verifies in one pass. It never changes
what the target says, only how fast. {contents_line(config, format)}

- weights: {weights:,}, {dtype}; {shape_line(config)}

## Training

{training_lines(config, recipe, step, data)}

{measured_lines(step, report, tau)}## Use

```
python -m domino_jax.decode --config=RECIPE --config.drafter.path=THIS_FOLDER --output=DIR
```

{serving_lines(config, recipe["target"]["path"], format)}

Written with {", ".join(f"{name} {version}" for name, version in packages.items())}.
"""


def contents_line(config: AnyConfig, format: str) -> str:
    """What the folder holds of the target."""
    if isinstance(config, MedusaConfig) and format == formats.VLLM:
        return "It holds no embeddings, but a copy of the\ntarget's lm_head, which vLLM demands."
    return "It holds no embeddings; those are the target's."


def shape_line(config: AnyConfig) -> str:
    if isinstance(config, MedusaConfig):
        return f"{config.num_heads} heads of {config.num_hidden_layers} blocks, on the target's lm_head"
    if isinstance(config, Eagle3Config):
        vocabulary = f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens in the draft vocabulary"
        return f"one layer, {vocabulary}, target layers {list(config.target_layer_ids)}"
    return f"""\
draft layers: {config.num_hidden_layers}
- block size {config.block_size}, shift_label {str(config.shift_label).lower()}, mask token {config.mask_token_id}, \
target layers {list(config.target_layer_ids)}"""


def row_serving_lines(config: Eagle3Config | MedusaConfig, target_path: str, format: str) -> str:
    """serving_lines of a drafter without blocks."""
    target, drafts = public_name(target_path), config.num_drafts
    if isinstance(config, MedusaConfig):
        settings = json.dumps({"method": "medusa", "model": "THIS_FOLDER", "num_speculative_tokens": drafts})
        missing = formats.vllm_refusal(config, format)
        return f"""\
{formats.sglang_refusal(config)}. {f"{missing}; then" if missing else "vLLM"}:

```
vllm serve {target} --speculative-config '{settings}'
```"""
    settings = json.dumps({"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": drafts})
    return f"""\
SGLang:

```
python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \
    --speculative-draft-model-path THIS_FOLDER --speculative-num-steps {drafts} --speculative-eagle-topk 1 \
    --speculative-num-draft-tokens {drafts + 1}
```

vLLM:

```
vllm serve {target} --speculative-config '{settings}'
```"""


def serving_lines(config: AnyConfig, target_path: str, format: str = formats.SERVING) -> str:
    """The commands of the servers that draft with this drafter, why the others do not, and their tokens per round."""
    if not config.has_backbone:
        return row_serving_lines(config, target_path, format)
    target, drafts = public_name(target_path), config.block_size - 1
    if reason := formats.sglang_refusal(config):
        parts = [f"SGLang does not serve this drafter: {reason}."]
    else:
        algorithm = "DSPARK" if config.head == MARKOV else "DFLASH"
        exact = " --speculative-domino-candidate-pool-size 0" if config.head == DOMINO else ""
        parts = [
            "SGLang (0.5.23 or later):",
            f"```\npython -m sglang.launch_server --model-path {target} --speculative-algorithm {algorithm}"
            f" --speculative-draft-model-path THIS_FOLDER{exact}\n```",
        ]
        if config.head == DOMINO:
            parts.append("Without the last flag SGLang corrects only the 2,048 tokens that the backbone scores best.")
    if reason := formats.vllm_refusal(config):
        parts.append(f"vLLM does not serve this drafter: {reason}.")
    else:
        method, tokens = ("dspark", config.num_drafts) if config.head == MARKOV else ("dflash", drafts)
        settings = json.dumps({"method": method, "model": "THIS_FOLDER", "num_speculative_tokens": tokens})
        parts += ["vLLM:", f"```\nvllm serve {target} --speculative-config '{settings}'\n```"]
        if formats.is_hub_id(target_path) and config.head == NONE:
            parts.append("`vllm serve THIS_FOLDER` does the same with the target's hub id in config.json.")
    if formats.sglang_refusal(config) is None and config.head != MARKOV:
        parts.append(
            f"A server drafts {drafts} of a block of {config.block_size}, so a round there emits at most"
            f" {config.block_size} tokens; domino_jax.decode drafts {config.num_drafts} and emits at most"
            f" {config.num_drafts + 1}."
        )
    return "\n\n".join(parts)


def training_lines(config: AnyConfig, recipe: Mapping[str, Any], step: int, data: Mapping[str, Any] | None) -> str:
    train, source = recipe["train"], recipe["data"]
    counted = ""
    if data is not None:
        counted = f"; {data['rows']:,} rows, {data['tokens']:,} tokens, fingerprint {data['fingerprint'][:16]}"
    loss = [f"slot decay γ {train['gamma']}"]
    own = config.head in (MARKOV, DFLASH2) and train["loss"] == "own"
    curriculum = config.has_head and not own
    if own and config.head == MARKOV:
        terms = ("cross-entropy", "L1 distance to the target", *["confidence"] * config.enable_confidence_head)
        shares = zip(terms, train["markov_weights"], strict=False)
        loss.insert(0, ", ".join(f"{words} {share:g}" for words, share in shares))
    if own and config.head == DFLASH2:
        loss.insert(0, f"selector's weight α {train['selector_alpha']:g}, rule {train['selector_rule']}")
    if curriculum:
        decay = share(train["lambda_decay_ratio"])
        loss.insert(0, f"λ of the base loss from {train['lambda_start']:g} to 0 over {decay}")
    if not config.has_backbone:
        eagle3 = train["eagle3"]
        passes = f"{eagle3['passes']} passes with weights {eagle3['decay']:g}^j, mask {eagle3['mask']}"
        loss = [passes if config.head == EAGLE3 else train["medusa_loss"]]
    names = {"dpace_alpha": "D-PACE α", "distill": "total-variation weight", "ema_decay": "weights averaged with"}
    loss += [f"{words} {train[key]:g}" for key, words in names.items() if train[key]]  # 0 is off
    if "rank_scales" in train and train["rank_scales"]:  # recipes of earlier runs have no such key
        loss.append(f"head cut at random to {', '.join(f'{scale:g}' for scale in train['rank_scales'])} of its rank")
    place = "pack" if source["layout"] == "pack" else "row"
    anchors = f", {train['num_anchors']} anchors a {place}" if config.has_backbone else ""
    answered = " (answers regenerated by the target)" if source["regenerate"] else ""
    return f"""\
- steps: {step:,} of {train["steps"]:,}, {train["batch_size"]} {place}s each{anchors}
- data: {public_sources(source["train"])}{answered}, at most {source["max_length"]} tokens a row{counted}
- {"curriculum and loss" if curriculum else "loss"}: {", ".join(loss)}
- {train["optimizer"]}, learning rate {train["learning_rate"]:g}, seed {recipe["seed"]}"""


def share(ratio: float | str) -> str:
    """A share of the run as text. Infinity, which JSON holds as a string, means that λ stays constant."""
    return "no number of steps (it stays)" if ratio == "inf" else f"{float(ratio):.0%} of the run"


def public_name(path: str) -> str:
    """A hub id unchanged, or the last part of a path: local folders and buckets are not published."""
    return Path(path).name if path.startswith(("/", ".", "~")) or is_remote(path) else path


def public_sources(sources: str) -> str:
    """public_name of each part of a mixture "A=0.7,B=0.3"."""
    named = []
    for source in sources.split(","):
        path, equals, weight = source.strip().rpartition("=")
        if not equals:
            path, weight = weight, ""
        name = Path(path).name if "/" in path else path
        named.append(f"{name} ({weight})" if weight else name)
    return ", ".join(named)


def measured_lines(step: int, report: Mapping[str, Any] | None, tau: float | None) -> str:
    """τ by mode from the final decoding, τ of the step from the evaluation in training; empty without both."""
    parts = []
    if tau is not None:
        parts.append(f"Decoded τ {tau:.2f} at step {step:,}, on the run's held-out prompts.")
    if report is not None:
        rank = report["settings"]["head_rank"] if "settings" in report else 0
        cut = f", its head cut to rank {rank}" if rank else ""
        parts.append(f"{report['prompts']['count']} held-out prompts, {report['dtype']}, {report['device']}{cut}:")
        rows = [["mode", "τ pooled", "τ per prompt", "× the target alone"]]
        for mode, figures in report["modes"].items():
            if figures["tau_pooled"] is not None:
                rows.append([mode, *(say(figures[key], ".2f") for key in ("tau_pooled", "tau_per_prompt", "speedup"))])
        parts.append("\n".join(grid(rows)))
        parts += [width_note(report)] * bool(report["drafter"])
    return "\n\n".join(["## Measured", *parts, ""]) if parts else ""
