"""What a report says about a run besides its figures, what tells two runs apart, and the times of a round's parts."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from domino_jax.decoding.settings import BASELINE, DecodeSettings, TreeSettings
from domino_jax.drafters.pair import Models
from domino_jax.evals.lanes import Lane
from domino_jax.evals.round_times import round_split, step_bounds
from domino_jax.evals.run import Speech, fingerprint, has_checker
from domino_jax.weights.loading import LoadedTarget


def describe(
    models: Models,
    target: LoadedTarget,
    rows: Sequence[Mapping[str, Any]],
    settings: DecodeSettings,
    named: Mapping[str, Any],
) -> dict[str, Any]:
    """The facts of report.json; `named` says where things came from: "settings", "target", "drafter", "prompts"."""
    template = target.tokenizer.chat_template if target.tokenizer is not None else None
    checked = sum(has_checker(row) for row in rows) if target.tokenizer is not None else 0
    drafter = None
    widths = {}
    if models.drafter:
        choices = models.drafter.config
        widths = settings.round_widths(choices)
        drafter = {
            **named["drafter"],
            "projector": choices.projector,
            "block_size": choices.block_size,
            "shift_label": choices.shift_label,
            "layers": choices.num_hidden_layers,
            "target_layer_ids": list(choices.target_layer_ids),
        }
    return {
        **named,
        "prompts": {**named["prompts"], "count": len(rows), "checked": checked},
        "drafter": drafter,
        "draft_scale": None if settings.draft_scale is None else str(settings.draft_scale),
        "tree_coupling": _coupling(settings.tree),
        "simulated": settings.simulate_tau or None,
        "dtype": settings.dtype,
        "thinking": settings.thinking,
        "template_sha256": hashlib.sha256(str(template).encode()).hexdigest() if template else None,
        "block_size": drafter["block_size"] if drafter else None,
        "round_widths": widths,
        "verify_width": max(widths.values(), default=1),
    }


def _coupling(tree: TreeSettings | None) -> dict[str, Any] | None:
    """c and spread of the trees, as the recipe or the drafter's tuning had them; None where none is coupled."""
    if not tree or not tree.coupled:
        return None
    return {"draft_scale": tree.draft_scale, "spread": tree.spread}


def run_identity(
    named: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], settings: DecodeSettings, *models: Models
) -> dict[str, Any]:
    """What an interrupted run must be continued with: the same names, and behind them the same prompts, drafters and
    constants that were tuned for these."""
    drafters = [_weights_fingerprint(one.drafter_params) for one in models if one.drafter]
    return {
        **named,
        "prompts": {**named["prompts"], "sha256": fingerprint(rows)},
        "weights": {"drafters": drafters, "draft_scale": str(settings.draft_scale), "tree": _coupling(settings.tree)},
    }


def _weights_fingerprint(params: dict) -> str:
    """Tells trained drafters apart without reading all of them: every norm's weights move with every step."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        if leaf.ndim == 1:
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def timings(lanes: Mapping[str, Lane], rows: Sequence[Mapping[str, Any]], speech: Speech) -> dict[str, Any]:
    """{"split": by drafting mode the seconds of a round's parts, "step": the lower bounds of a plain step}."""
    drafting = [mode for mode in lanes if mode != BASELINE]
    lane = lanes[(drafting or list(lanes))[0]]
    models, generator = lane.models, lane.generator
    first = rows[: generator.settings.batch_size]
    state = generator.start(models, [speech.encode(row) for row in first], list(range(len(first))))
    split = round_split(models, generator, state, drafting) if drafting else {}
    return {"split": split, "step": step_bounds(models, state)}
