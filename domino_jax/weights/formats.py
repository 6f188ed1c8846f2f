"""The folders a drafter is exported as, and which released servers draft with it as it was trained.

What the servers do was read in the sources of SGLang 0.5.23 and vLLM 0.33, and compared with SGLang's classes and
with vLLM 0.32 (docs/serving.md).
"""

import re
from pathlib import Path
from typing import Any

from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafters import AnyConfig
from domino_jax.method.fields import to_speculators
from domino_jax.runtime.errors import DominoError
from domino_jax.weights import speculators

# serving: what SGLang and vLLM open. specforge, speculators: what the trainings of these continue from.
FORMATS = (SERVING, SPECFORGE, SPECULATORS) = ("serving", "specforge", "speculators")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CACHED = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/")


def public_config(config: AnyConfig, format: str = SERVING, verifier: str | None = None) -> dict[str, Any]:
    """The config.json of an exported folder.

    format: one of FORMATS.  verifier: the target's path; a hub id lets vLLM start from the folder alone.
    """
    raw = config.to_dict()
    if format == SPECULATORS:
        if not config.speculators.architecture:
            raise DominoError(f"--format={SPECULATORS} has no form for {config.title} drafters; use {SERVING}.")
        keys = speculators_keys(config, raw, verifier) | to_speculators(config, DrafterConfig)
        return {"architectures": [config.speculators.architecture], "block_size": config.block_size, **keys}
    if format == SPECFORGE and config.servers.specforge:
        return {**raw, "architectures": [config.servers.specforge]}
    plain = config.has_backbone and not config.has_head and config.server_refusals()[1] is None
    # These keys do not state causal full layers: there, they always read the whole block.
    if format == SERVING and plain and is_hub_id(verifier):
        if not (config.is_causal and "full_attention" in raw["layer_types"]):
            raw |= speculators_keys(config, raw, verifier)
    return raw


def speculators_keys(config: DrafterConfig, raw: dict[str, Any], verifier: str) -> dict[str, Any]:
    """The keys with which `vllm serve FOLDER` finds the target and the number of drafts by itself, and with which
    speculators opens the folder. Readers of flat files read theirs beside them.

    raw: the flat config.json.
    """
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
    return {
        "speculators_model_type": config.speculators.name,
        "transformer_layer_config": {name: raw[name] for name in speculators.LAYER_KEYS},
        speculators.LAYER_IDS: [index + 1 for index in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "sample_from_anchor": config.shift_label,
        "sliding_window_non_causal": config.is_causal is False,
        "speculators_config": {
            "algorithm": config.speculators.name,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }


def is_hub_id(path: str | None) -> bool:
    """True for "owner/name" that is no folder here. A revision has no key to be written under, so it makes none."""
    return path is not None and _HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def hub_id(path: str) -> str | None:
    """The hub id of a path: its own, without a revision, or that of a folder in the hub's cache; else None."""
    name, cached = path.partition("@")[0], _CACHED.search(path)
    return f"{cached[1]}/{cached[2]}" if cached else name if is_hub_id(name) else None


def serving_note(config: AnyConfig) -> str | None:
    """A sentence for whoever exports a drafter that no other released server drafts with; None for the others."""
    reasons = config.server_refusals()
    if None in reasons:
        return None
    return (
        f"SGLang cannot serve this drafter: {reasons[0]}. vLLM cannot either: {reasons[1]}. domino_jax.serve and"
        " domino_jax.decode read it."
    )
