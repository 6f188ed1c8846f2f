"""The folders a drafter is exported as, and which released servers draft with it as it was trained.

What the servers do was read in the sources of SGLang 0.5.23 and vLLM 0.33, and compared with classes of theirs
(docs/decoding.md).
"""

import re
from pathlib import Path
from typing import Any

from domino_jax.method.config import DrafterConfig
from domino_jax.method.kinds import AnyConfig
from domino_jax.method.names import DFLASH2, DOMINO, EAGLE3, MARKOV, MEDUSA, NONE, VANILLA
from domino_jax.weights import speculators

# serving: what SGLang and vLLM open. specforge: what SpecForge's training continues from.
FORMATS = (SERVING, SPECFORGE) = ("serving", "specforge")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def public_config(config: AnyConfig, format: str = SERVING, verifier: str | None = None) -> dict[str, Any]:
    """The config.json of an exported folder.

    Args:
        format: one of FORMATS.  verifier: the target's path; a hub id lets vLLM start from the folder alone.
    """
    raw = config.to_dict()
    if format == SPECFORGE and config.head == DOMINO:
        return {**raw, "architectures": ["DominoDraftModel"]}
    if format == SERVING and config.head == NONE and vllm_refusal(config) is None and is_hub_id(verifier):
        raw |= speculators_keys(config, raw, verifier)
    return raw


def speculators_keys(config: DrafterConfig, raw: dict[str, Any], verifier: str) -> dict[str, Any]:
    """The keys with which `vllm serve FOLDER` finds the target and the number of drafts by itself, and with which
    speculators opens the folder. Readers of flat files read theirs beside them.

    Args:
        raw: the flat config.json.
    """
    # The sections do not state it: there, full layers always read the whole block.
    if config.is_causal and "full_attention" in raw["layer_types"]:
        return {}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    return {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {name: raw[name] for name in speculators.LAYER_KEYS},
        speculators.LAYER_IDS: [index + 1 for index in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": config.is_causal is False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }


def is_hub_id(path: str | None) -> bool:
    """True for "owner/name" that is no folder here. A revision has no key to be written under, so it makes none."""
    return path is not None and _HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def sglang_refusal(config: AnyConfig) -> str | None:
    """Why SGLang does not draft with this drafter as it was trained; None when it does."""
    if config.head == MEDUSA:
        return "SGLang has no Medusa heads"
    if config.head == EAGLE3:
        return "SGLang does not know norm_before_residual" if config.norm_before_residual else None
    if config.head == DOMINO and config.pure_draft_prefix_len != 1:
        return f"SGLang requires pure_draft_prefix_len 1, and this drafter has {config.pure_draft_prefix_len}"
    if config.shift_label and config.head == NONE:
        return "SGLang reads a plain DFlash drafter as unshifted and would draft one position late"
    return _convolution_refusal(config)


def vllm_refusal(config: AnyConfig) -> str | None:
    """Why vLLM does not draft with this drafter as it was trained; None when it does."""
    if config.head == MEDUSA:
        return "its last release with Medusa heads is 0.32, which reads a copy of the target's lm_head from the folder"
    if config.head == EAGLE3:
        return None
    if config.head == MARKOV and config.markov_head_type != VANILLA:
        return f"vLLM has the vanilla Markov head, and this drafter has the {config.markov_head_type} one"
    if config.head == DOMINO:
        return "vLLM has no Domino head"
    if config.head == NONE and config.shift_label:
        return "vLLM refuses sample_from_anchor for DFlash"
    return _convolution_refusal(config)


def _convolution_refusal(config: DrafterConfig) -> str | None:
    """Servers know a selector and convolutions together only."""
    if config.head == DFLASH2 and not config.conv_kernel_size:
        return "servers read DFlash2 drafters with convolutions only, and this one has conv_kernel_size 0"
    if config.head != DFLASH2 and config.conv_kernel_size:
        return f"servers read convolutions of DFlash2 drafters only, and this one has head {config.head}"
    return None


def serving_note(config: AnyConfig) -> str | None:
    """A sentence for whoever exports a drafter that no released server drafts with; None for the others."""
    reasons = sglang_refusal(config), vllm_refusal(config)
    if None in reasons:
        return None
    return (
        f"SGLang cannot serve this drafter: {reasons[0]}. vLLM cannot either: {reasons[1]}. domino_jax.decode reads it."
    )
